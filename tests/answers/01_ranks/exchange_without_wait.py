# exercise: 3
# expect: rank 0's row 1 is all zeros: is there a receive from rank 1, kept and waited for

def all_to_all(incoming, outgoing):
    rank = dist.get_rank()
    incoming[rank] = outgoing[rank]
    for peer in range(dist.get_world_size()):
        if peer != rank:
            dist.isend(outgoing[peer], peer)
            dist.irecv(incoming[peer], peer)
