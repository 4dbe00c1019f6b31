# exercise: 2
# expect: pass

def all_gather(out, mine):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    out[rank] = mine
    for step in range(world_size - 1):
        outgoing, incoming = out[(rank - step) % world_size], out[(rank - step - 1) % world_size]
        requests = [dist.isend(outgoing, (rank + 1) % world_size), dist.irecv(incoming, (rank - 1) % world_size)]
        for request in requests:
            request.wait()
