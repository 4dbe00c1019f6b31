# exercise: 5
# expect: divide by the seconds

def bus_bandwidth(num_bytes, seconds, world_size):
    return num_bytes * 2 * (world_size - 1) / world_size
