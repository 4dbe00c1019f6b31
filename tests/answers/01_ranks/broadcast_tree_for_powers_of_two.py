# exercise: 1
# expect: there is no rank 3: ranks are 0 to 2

def broadcast(buffer, root):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    distance = 1
    while distance < world_size:
        place = rank ^ root
        if place < distance:
            dist.send(buffer, (place + distance) ^ root)
        elif place < 2 * distance:
            dist.recv(buffer, (place - distance) ^ root)
        distance *= 2
