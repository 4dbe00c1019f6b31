# exercise: 3
# expect: pass

def ring_all_reduce(buffer):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    chunks = buffer.tensor_split(world_size)
    for step in range(2 * world_size - 2):
        adding = step < world_size - 1
        ahead = 0 if adding else 1
        index = step if adding else step - (world_size - 1)
        mine = chunks[(rank + ahead - index - 1) % world_size]
        landing = torch.empty_like(mine)
        if rank == 0:
            dist.recv(landing, world_size - 1)
            dist.send(chunks[(rank + ahead - index) % world_size], 1 % world_size)
        else:
            dist.send(chunks[(rank + ahead - index) % world_size], (rank + 1) % world_size)
            dist.recv(landing, rank - 1)
        mine.copy_(mine + landing if adding else landing)
