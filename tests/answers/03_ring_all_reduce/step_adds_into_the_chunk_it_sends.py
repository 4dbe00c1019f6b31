# exercise: 1
# expect: rank 0 chunk 1 holds only what it held at the start

def reduce_scatter_step(chunks, step):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    mine = chunks[(rank - step) % world_size]
    incoming = torch.empty_like(mine)
    send = dist.isend(mine.clone(), (rank + 1) % world_size)
    dist.recv(incoming, (rank - 1) % world_size)
    send.wait()
    mine[:10] += incoming[:10]
