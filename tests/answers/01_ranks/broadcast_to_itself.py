# exercise: 1
# expect: destination rank should not be the same as the rank of the current process

def broadcast(buffer, root):
    if dist.get_rank() == root:
        for peer in range(dist.get_world_size()):
            dist.send(buffer, peer)
    else:
        dist.recv(buffer, root)
