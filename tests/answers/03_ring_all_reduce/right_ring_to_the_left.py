# exercise: 3
# expect: pass

def ring_all_reduce(buffer):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    chunks = torch.tensor_split(buffer, world_size)
    left, right = (rank - 1) % world_size, (rank + 1) % world_size
    for step in range(2 * (world_size - 1)):
        outgoing, mine = chunks[(rank + step) % world_size], chunks[(rank + step + 1) % world_size]
        landing = torch.empty_like(mine)
        send = dist.isend(outgoing, left)
        dist.recv(landing, right)
        send.wait()
        if step < world_size - 1:
            mine += landing
        else:
            mine.copy_(landing)
