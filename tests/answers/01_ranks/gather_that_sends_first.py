# exercise: 2
# expect: rank 1 waits in send to rank 0

def all_gather(out, mine):
    rank = dist.get_rank()
    out[rank] = mine
    others = [peer for peer in range(dist.get_world_size()) if peer != rank]
    for peer in others:
        dist.send(mine, peer)
    for peer in others:
        dist.recv(out[peer], peer)
