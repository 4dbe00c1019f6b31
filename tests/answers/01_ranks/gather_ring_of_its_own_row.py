# exercise: 2
# expect: In a ring, do you pass on what came, or your own row again?

def all_gather(out, mine):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    out[rank] = mine
    for step in range(1, world_size):
        send = dist.isend(mine, (rank + 1) % world_size)
        dist.recv(out[(rank - step) % world_size], (rank - 1) % world_size)
        send.wait()
