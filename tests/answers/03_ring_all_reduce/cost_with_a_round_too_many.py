# exercise: 4
# expect: the last contribution has N-1 links to go, not N

def ring_cost(num_bytes, world_size):
    return 2 * world_size, 2 * num_bytes
