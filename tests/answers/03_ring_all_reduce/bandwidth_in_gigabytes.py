# exercise: 5
# expect: that is in GB/s

def bus_bandwidth(num_bytes, seconds, world_size):
    return num_bytes / seconds * 2 * (world_size - 1) / world_size / 1e9
