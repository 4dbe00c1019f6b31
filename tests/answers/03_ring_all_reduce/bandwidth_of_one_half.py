# exercise: 5
# expect: an all-reduce does that twice

def bus_bandwidth(num_bytes, seconds, world_size):
    return num_bytes / seconds * (world_size - 1) / world_size
