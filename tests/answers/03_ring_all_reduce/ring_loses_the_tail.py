# exercise: 3
# expect: the last 3 of 43 elements were left out

def ring_all_reduce(buffer):
    world_size = dist.get_world_size()
    size = len(buffer) // world_size
    chunks = [buffer[i * size:(i + 1) * size] for i in range(world_size)]
    for step in range(world_size - 1):
        reduce_scatter_step(chunks, step)
    for step in range(world_size - 1):
        all_gather_step(chunks, step)
