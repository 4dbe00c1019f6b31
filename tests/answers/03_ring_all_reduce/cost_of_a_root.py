# exercise: 4
# expect: that is the traffic of a root

def ring_cost(num_bytes, world_size):
    return 2 * (world_size - 1), (world_size - 1) * num_bytes
