# exercise: 3
# expect: `incoming` is as it was, all zeros

def all_to_all(incoming, outgoing):
    rank, requests = dist.get_rank(), []
    incoming = outgoing.clone()
    for peer in range(dist.get_world_size()):
        if peer != rank:
            requests += [dist.isend(outgoing[peer], peer), dist.irecv(incoming[peer], peer)]
    for request in requests:
        request.wait()
    return incoming
