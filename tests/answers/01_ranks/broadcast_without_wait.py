# exercise: 1
# expect: into `buffer` itself and no other tensor, and is the receive waited for?

def broadcast(buffer, root):
    if dist.get_rank() == root:
        time.sleep(0.2)
        for peer in range(dist.get_world_size()):
            if peer != root:
                dist.send(buffer, peer)
    else:
        global request
        request = dist.irecv(buffer, root)
