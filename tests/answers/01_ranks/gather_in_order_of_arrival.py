# exercise: 2
# expect: the rows are in the order in which you handled them, and belong in the order of the ranks

def all_gather(out, mine):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    out[0] = mine
    for step in range(1, world_size):
        send = dist.isend(mine, (rank + step) % world_size)
        dist.recv(out[step], (rank - step) % world_size)
        send.wait()
