# exercise: 1
# expect: of 10 places: the whole buffer must come

def broadcast(buffer, root):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    chunks = buffer.tensor_split(world_size)
    if rank == root:
        for peer in range(world_size):
            if peer != root:
                dist.send(chunks[peer], peer)
    else:
        dist.recv(chunks[rank], root)
