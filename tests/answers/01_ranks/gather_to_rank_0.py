# exercise: 2
# expect: only rank 0 has the rows: that is a gather

def all_gather(out, mine):
    if dist.get_rank() == 0:
        out[0] = mine
        for peer in range(1, dist.get_world_size()):
            dist.recv(out[peer], peer)
    else:
        dist.send(mine, 0)
