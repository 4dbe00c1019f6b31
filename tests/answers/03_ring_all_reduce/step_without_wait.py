# exercise: 1
# expect: did you wait() for what you receive before you used it

def reduce_scatter_step(chunks, step):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    mine = chunks[(rank - step - 1) % world_size]
    incoming = torch.zeros_like(mine)
    mine += incoming
    requests = [dist.isend(chunks[(rank - step) % world_size], (rank + 1) % world_size),
                dist.irecv(incoming, (rank - 1) % world_size)]
    for request in requests:
        request.wait()
