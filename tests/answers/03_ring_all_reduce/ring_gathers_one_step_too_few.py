# exercise: 3
# expect: rank 0 chunk 2 lacks the contribution of rank 1

def ring_all_reduce(buffer):
    world_size = dist.get_world_size()
    chunks = buffer.tensor_split(world_size)
    for step in range(world_size - 1):
        reduce_scatter_step(chunks, step)
    for step in range(world_size - 2):
        all_gather_step(chunks, step)
