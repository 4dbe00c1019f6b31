# exercise: 3
# expect: rank 0 sent 2.00 times the buffer, a ring sends 1.50 times: is one of the steps made too often

def ring_all_reduce(buffer):
    world_size = dist.get_world_size()
    chunks = buffer.tensor_split(world_size)
    for step in range(world_size):
        reduce_scatter_step(chunks, step)
    for step in range(world_size):
        all_gather_step(chunks, step)
