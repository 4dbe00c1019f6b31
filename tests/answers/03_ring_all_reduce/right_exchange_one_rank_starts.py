# exercise: 6
# expect: pass

def exchange(outgoing, incoming):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if rank == 0:
        dist.send(outgoing, (rank + 1) % world_size)
        dist.recv(incoming, world_size - 1)
    else:
        dist.recv(incoming, rank - 1)
        dist.send(outgoing, (rank + 1) % world_size)
