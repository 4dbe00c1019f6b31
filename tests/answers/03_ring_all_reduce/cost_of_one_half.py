# exercise: 4
# expect: the number of rounds is 4: that is the reduce-scatter alone

def ring_cost(num_bytes, world_size):
    return world_size - 1, (world_size - 1) / world_size * num_bytes
