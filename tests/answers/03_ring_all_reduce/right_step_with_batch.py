# exercise: 1
# expect: pass

def reduce_scatter_step(chunks, step):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    sent, kept = (rank - step) % world_size, (rank - step - 1) % world_size
    landing = torch.zeros_like(chunks[kept])
    operations = [dist.P2POp(dist.irecv, landing, (rank - 1) % world_size),
                  dist.P2POp(dist.isend, chunks[sent], (rank + 1) % world_size)]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    torch.add(chunks[kept], landing, out=chunks[kept])
