# exercise: 6
# expect: did not receive what rank

def exchange(outgoing, incoming):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    landing = torch.empty_like(incoming)
    requests = [dist.isend(outgoing, (rank + 1) % world_size), dist.irecv(landing, (rank - 1) % world_size)]
    for request in requests:
        request.wait()
    incoming.copy_(outgoing)
