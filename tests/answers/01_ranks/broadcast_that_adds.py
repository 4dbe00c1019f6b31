# exercise: 1
# expect: holds its own data plus the root's: a broadcast replaces, it does not add

def broadcast(buffer, root):
    if dist.get_rank() == root:
        for peer in range(dist.get_world_size()):
            if peer != root:
                dist.send(buffer, peer)
    else:
        incoming = torch.empty_like(buffer)
        dist.recv(incoming, root)
        buffer += incoming
