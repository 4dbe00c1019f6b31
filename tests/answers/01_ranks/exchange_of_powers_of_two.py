# exercise: 3
# expect: index 3 is out of bounds for dimension 0 with size 3

def all_to_all(incoming, outgoing):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    incoming[rank] = outgoing[rank]
    step = 1
    while step < world_size:
        partner = rank ^ step
        send = dist.isend(outgoing[partner], partner)
        dist.recv(incoming[partner], partner)
        send.wait()
        step += 1
