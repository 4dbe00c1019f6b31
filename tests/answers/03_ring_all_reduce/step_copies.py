# exercise: 1
# expect: was it copied where it should be added?

def reduce_scatter_step(chunks, step):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    requests = [dist.isend(chunks[(rank - step) % world_size], (rank + 1) % world_size),
                dist.irecv(chunks[(rank - step - 1) % world_size], (rank - 1) % world_size)]
    for request in requests:
        request.wait()
