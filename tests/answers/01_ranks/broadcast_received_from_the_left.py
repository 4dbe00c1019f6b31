# exercise: 1
# expect: waits in recv from rank 0

def broadcast(buffer, root):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if rank == root:
        for peer in range(world_size):
            if peer != root:
                dist.send(buffer, peer)
    else:
        dist.recv(buffer, (rank - 1) % world_size)
