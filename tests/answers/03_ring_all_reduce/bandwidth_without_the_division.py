# exercise: 5
# expect: the division by N is missing

def bus_bandwidth(num_bytes, seconds, world_size):
    return num_bytes / seconds * 2 * (world_size - 1)
