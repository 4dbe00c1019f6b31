# exercise: 4
# expect: that is the limit for many ranks

def ring_cost(num_bytes, world_size):
    return 2 * (world_size - 1), 2 * num_bytes
