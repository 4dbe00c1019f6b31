# exercise: 2
# expect: rank 0: row 1 holds rank 3's numbers: what comes from rank s belongs in row s

def all_gather(out, mine):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    for step in range(1, world_size):
        send = dist.isend(mine, (rank + step) % world_size)
        dist.recv(out[(rank + step) % world_size], (rank - step) % world_size)
        send.wait()
    out[rank] = mine
