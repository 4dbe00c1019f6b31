# exercise: 3
# expect: holds this rank's own numbers for rank

def all_to_all(incoming, outgoing):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    for low in range(world_size):
        for high in range(low + 1, world_size):
            if rank == low:
                dist.recv(outgoing[high], high)
                dist.send(outgoing[high], high)
            elif rank == high:
                dist.send(outgoing[low], low)
                dist.recv(outgoing[low], low)
    incoming.copy_(outgoing)
