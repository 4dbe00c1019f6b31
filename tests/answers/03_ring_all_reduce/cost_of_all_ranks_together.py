# exercise: 4
# expect: that is what all ranks send together

def ring_cost(num_bytes, world_size):
    return 2 * (world_size - 1), 2 * (world_size - 1) * num_bytes
