# exercise: 2
# expect: pass

def all_gather(out, mine):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    rows = [torch.empty_like(mine) for _ in range(world_size)]
    rows[rank].copy_(mine)
    requests = [dist.isend(mine, peer) for peer in range(world_size) if peer != rank]
    for peer in range(world_size):
        if peer != rank:
            dist.recv(rows[peer], peer)
    for request in requests:
        request.wait()
    out.copy_(torch.stack(rows))
