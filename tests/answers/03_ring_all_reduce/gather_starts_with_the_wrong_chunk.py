# exercise: 2
# expect: in step 0 rank r sends chunk r+1

def all_gather_step(chunks, step):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    send = dist.isend(chunks[(rank - step) % world_size], (rank + 1) % world_size)
    dist.recv(chunks[(rank - 1 - step) % world_size], (rank - 1) % world_size)
    send.wait()
