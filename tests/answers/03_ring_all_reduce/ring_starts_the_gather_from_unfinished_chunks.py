# exercise: 3
# expect: rank 0 chunk 0 holds only what it held at the start

def ring_all_reduce(buffer):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    chunks = buffer.tensor_split(world_size)
    for step in range(world_size - 1):
        reduce_scatter_step(chunks, step)
    for step in range(world_size - 1):
        landing = torch.empty_like(chunks[(rank - 1 - step) % world_size])
        send = dist.isend(chunks[(rank - step) % world_size], (rank + 1) % world_size)
        dist.recv(landing, (rank - 1) % world_size)
        send.wait()
        chunks[(rank - 1 - step) % world_size].copy_(landing)
