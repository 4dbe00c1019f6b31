# exercise: 3
# expect: the all-gather that carries the sums to the others is missing

def ring_all_reduce(buffer):
    world_size = dist.get_world_size()
    chunks = buffer.tensor_split(world_size)
    for step in range(world_size - 1):
        reduce_scatter_step(chunks, step)
