# exercise: 5
# expect: that is the algorithm bandwidth

def bus_bandwidth(num_bytes, seconds, world_size):
    return num_bytes / seconds
