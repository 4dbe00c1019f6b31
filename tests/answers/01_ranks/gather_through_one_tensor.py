# exercise: 2
# expect: if they share one tensor, the last message filled it

def all_gather(out, mine):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    out[rank] = mine
    incoming, rows, requests = torch.empty_like(mine), {}, []
    for distance in range(1, world_size):
        right, left = (rank + distance) % world_size, (rank - distance) % world_size
        send = dist.isend(mine, right)
        dist.recv(incoming, left)
        send.wait()
        rows[left] = incoming
    for source in rows:
        out[source] = rows[source]
