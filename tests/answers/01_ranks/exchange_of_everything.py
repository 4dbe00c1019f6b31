# exercise: 3
# expect: is it an all-gather, of which each rank picks its part

def all_to_all(incoming, outgoing):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    everything = outgoing.new_zeros(world_size, outgoing.numel())
    all_gather(everything, outgoing.reshape(-1))
    incoming.copy_(everything.view(world_size, *outgoing.shape)[:, rank])
