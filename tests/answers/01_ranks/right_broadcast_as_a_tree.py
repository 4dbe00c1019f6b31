# exercise: 1
# expect: pass

def broadcast(buffer, root):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    place, distance = (rank - root) % world_size, 1
    while distance < world_size:
        if place < distance and place + distance < world_size:
            dist.send(buffer, (rank + distance) % world_size)
        elif distance <= place < 2 * distance:
            dist.recv(buffer, (rank - distance) % world_size)
        distance *= 2
