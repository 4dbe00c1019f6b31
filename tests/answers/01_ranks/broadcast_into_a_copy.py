# exercise: 1
# expect: rank 0 still holds its own data: does it receive, into `buffer` itself

def broadcast(buffer, root):
    rank = dist.get_rank()
    if rank == root:
        for peer in range(dist.get_world_size()):
            if peer != root:
                dist.send(buffer, peer)
    else:
        incoming = torch.empty_like(buffer)
        dist.recv(incoming, root)
        buffer = incoming
