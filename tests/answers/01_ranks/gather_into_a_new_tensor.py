# exercise: 2
# expect: rank 0: `out` is as it was, all zeros

def all_gather(out, mine):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    rows = [torch.empty_like(mine) for _ in range(world_size)]
    rows[rank] = mine
    requests = []
    for peer in range(world_size):
        if peer != rank:
            requests += [dist.isend(mine, peer), dist.irecv(rows[peer], peer)]
    for request in requests:
        request.wait()
    out = torch.stack(rows)
