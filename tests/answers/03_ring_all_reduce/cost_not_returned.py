# exercise: 4
# expect: must be a number, not NoneType

def ring_cost(num_bytes, world_size):
    return 2 * (world_size - 1), print(2 * (world_size - 1) / world_size * num_bytes)
