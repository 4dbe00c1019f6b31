# exercise: 3
# expect: your ranks hold the mean

def ring_all_reduce(buffer):
    world_size = dist.get_world_size()
    chunks = buffer.tensor_split(world_size)
    for step in range(world_size - 1):
        reduce_scatter_step(chunks, step)
    for step in range(world_size - 1):
        all_gather_step(chunks, step)
    buffer /= world_size
