# exercise: 1
# expect: pass

def reduce_scatter_step(chunks, step):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    incoming = torch.empty_like(chunks[(rank - step - 1) % world_size])
    send = dist.isend(chunks[(rank - step) % world_size], (rank + 1) % world_size)
    dist.irecv(incoming, (rank - 1) % world_size).wait()
    send.wait()
    chunks[(rank - step - 1) % world_size] += incoming
