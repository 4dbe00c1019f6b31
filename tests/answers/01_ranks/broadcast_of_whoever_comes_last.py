# exercise: 1
# expect: but the root is rank 2: it is an argument

def broadcast(buffer, root):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    for sender in range(world_size):
        for receiver in range(world_size):
            if sender == receiver:
                continue
            if rank == sender:
                dist.send(buffer, receiver)
            elif rank == receiver:
                dist.recv(buffer, sender)
