# exercise: 2
# expect: rank 0: row 1 is all zeros: is there a receive from rank 1, kept and waited for

def all_gather(out, mine):
    rank = dist.get_rank()
    out[rank] = mine
    for peer in range(dist.get_world_size()):
        if peer != rank:
            dist.isend(mine, peer)
            dist.irecv(out[peer], peer)
