# exercise: 1
# expect: rank 2 waits in send to rank 0

def broadcast(buffer, root):
    if dist.get_rank() == root:
        for peer in range(dist.get_world_size()):
            if peer != root:
                dist.send(buffer, peer)
