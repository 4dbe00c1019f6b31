# exercise: 3
# expect: rank 0 sent 72 bytes, and its rows for the others have 144

def all_to_all(incoming, outgoing):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    narrow, came = outgoing.float(), incoming.float()
    came[rank] = narrow[rank]
    for distance in range(1, world_size):
        right, left = (rank + distance) % world_size, (rank - distance) % world_size
        send = dist.isend(narrow[right], right)
        dist.recv(came[left], left)
        send.wait()
    incoming.copy_(came)
