# exercise: 1
# expect: pass

def broadcast(buffer, root):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if rank != root:
        dist.recv(buffer, (rank - 1) % world_size)
    if (rank + 1) % world_size != root:
        dist.send(buffer, (rank + 1) % world_size)
