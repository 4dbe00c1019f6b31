# exercise: 1
# ends: over a wire that only sends and receives: the ranks wait for one another

# Everybody receives first.
def ring_all_reduce(buffer):
    if dist.get_backend() != "wire":
        dist.all_reduce(buffer)
        return
    dist.recv(torch.empty_like(buffer), (dist.get_rank() - 1) % dist.get_world_size())
