# exercise: 1
# expect: received 3 times the buffer

def broadcast(buffer, root):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    others = [peer for peer in range(world_size) if peer != rank]
    mine, incoming = buffer.clone(), torch.empty_like(buffer)
    sends = [dist.isend(mine, peer) for peer in others]
    for peer in others:
        dist.recv(incoming, peer)
        if peer == root:
            buffer.copy_(incoming)
    for request in sends:
        request.wait()
