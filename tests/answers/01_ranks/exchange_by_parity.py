# exercise: 3
# expect: rank 0 waits in send to rank 2

def all_to_all(incoming, outgoing):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    incoming[rank] = outgoing[rank]
    for distance in range(1, world_size):
        right, left = (rank + distance) % world_size, (rank - distance) % world_size
        if rank % 2 == 0:
            dist.send(outgoing[right], right)
            dist.recv(incoming[left], left)
        else:
            dist.recv(incoming[left], left)
            dist.send(outgoing[right], right)
