# exercise: 3
# expect: that is the traffic of a root

def ring_all_reduce(buffer):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    incoming = torch.empty_like(buffer)
    if rank == 0:
        for peer in range(1, world_size):
            dist.recv(incoming, peer)
            buffer += incoming
        for peer in range(1, world_size):
            dist.send(buffer, peer)
    else:
        dist.send(buffer, 0)
        dist.recv(buffer, 0)
