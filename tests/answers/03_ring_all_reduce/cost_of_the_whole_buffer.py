# exercise: 4
# expect: that is the buffer once

def ring_cost(num_bytes, world_size):
    return 2 * (world_size - 1), num_bytes
