# exercise: 3
# expect: which row goes to whom

def all_to_all(incoming, outgoing):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    incoming[rank] = outgoing[rank]
    for distance in range(1, world_size):
        right, left = (rank + distance) % world_size, (rank - distance) % world_size
        send = dist.isend(outgoing[distance], right)
        dist.recv(incoming[left], left)
        send.wait()
