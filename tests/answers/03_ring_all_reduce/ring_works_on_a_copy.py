# exercise: 3
# expect: every buffer is as it was before

def ring_all_reduce(buffer):
    world_size = dist.get_world_size()
    buffer = buffer.clone()
    chunks = buffer.tensor_split(world_size)
    for step in range(world_size - 1):
        reduce_scatter_step(chunks, step)
    for step in range(world_size - 1):
        all_gather_step(chunks, step)
    return buffer
