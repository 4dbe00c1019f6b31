# exercise: 2
# expect: rank 0: row 0, its own, is all zeros: nobody sends you that

def all_gather(out, mine):
    rank, requests = dist.get_rank(), []
    for peer in range(dist.get_world_size()):
        if peer != rank:
            requests += [dist.isend(mine, peer), dist.irecv(out[peer], peer)]
    for request in requests:
        request.wait()
