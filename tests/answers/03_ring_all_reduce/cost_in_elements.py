# exercise: 4
# expect: that counts elements: each has 4 bytes

def ring_cost(num_bytes, world_size):
    return 2 * (world_size - 1), 2 * (world_size - 1) / world_size * num_bytes / 4
