# exercise: 4
# expect: a rank sends one in each round

def ring_cost(num_bytes, world_size):
    return 2 * (world_size - 1), num_bytes / world_size
