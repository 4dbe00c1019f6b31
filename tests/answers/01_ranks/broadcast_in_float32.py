# exercise: 1
# expect: rank 0 received 40 bytes, and the buffer has 80

def broadcast(buffer, root):
    narrow = buffer.float()
    for peer in range(dist.get_world_size()):
        if peer != root and dist.get_rank() == root:
            dist.send(narrow, peer)
        elif peer == dist.get_rank() != root:
            dist.recv(narrow, root)
    buffer.copy_(narrow)
