# exercise: 1
# expect: lacks the contribution of rank

def reduce_scatter_step(chunks, step):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    mine = chunks[(rank + step - 1) % world_size]
    incoming = torch.empty_like(mine)
    send = dist.isend(chunks[(rank + step) % world_size], (rank + 1) % world_size)
    dist.recv(incoming, (rank - 1) % world_size)
    send.wait()
    mine += incoming
