# exercise: 1
# expect: pass

def broadcast(buffer, root):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    chunks = buffer.tensor_split(world_size)
    others = [peer for peer in range(world_size) if peer != rank]
    if rank == root:
        for peer in others:
            dist.send(chunks[peer], peer)
    else:
        dist.recv(chunks[rank], root)
    requests = [dist.isend(chunks[rank], peer) for peer in others]
    requests += [dist.irecv(chunks[peer], peer) for peer in others]
    for request in requests:
        request.wait()
