# exercise: 1
# expect: there is no rank 4: ranks are 0 to 3

def reduce_scatter_step(chunks, step):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    mine = chunks[rank - step - 1]
    incoming = torch.empty_like(mine)
    send = dist.isend(chunks[rank - step], rank + 1)
    dist.recv(incoming, (rank - 1) % world_size)
    send.wait()
    mine += incoming
