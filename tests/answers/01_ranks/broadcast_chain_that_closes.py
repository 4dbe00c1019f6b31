# exercise: 1
# expect: is the root and received the whole buffer

def broadcast(buffer, root):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if world_size == 1:
        return
    right, left = (rank + 1) % world_size, (rank - 1) % world_size
    if rank == root:
        dist.send(buffer, right)
        dist.recv(buffer, left)
    else:
        dist.recv(buffer, left)
        dist.send(buffer, right)
