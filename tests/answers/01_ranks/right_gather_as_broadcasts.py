# exercise: 2
# expect: pass

def all_gather(out, mine):
    out[dist.get_rank()] = mine
    for root in range(dist.get_world_size()):
        broadcast(out[root], root)
