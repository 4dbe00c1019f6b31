# exercise: 5
# expect: pass

def bus_bandwidth(num_bytes, seconds, world_size):
    share = 1 - 1 / world_size
    return (share + share) * num_bytes / seconds
