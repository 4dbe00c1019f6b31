# exercise: 2
# expect: holds a sum of several ranks' numbers: an all-gather keeps them apart

def all_gather(out, mine):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    incoming = torch.empty_like(mine)
    out += mine
    for step in range(1, world_size):
        send = dist.isend(mine, (rank + step) % world_size)
        dist.recv(incoming, (rank - step) % world_size)
        send.wait()
        out += incoming
