# exercise: 4
# expect: that is the number of bytes: the rounds come first

def ring_cost(num_bytes, world_size):
    return 2 * (world_size - 1) / world_size * num_bytes, 2 * (world_size - 1)
