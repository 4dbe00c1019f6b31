# exercise: 1
# ends: stopped: the ranks were not done

# Everybody receives first.
def ring_all_reduce(buffer):
    if dist.get_backend() != "wire":
        dist.all_reduce(buffer)
        return
    dist.recv(torch.empty_like(buffer), (dist.get_rank() - 1) % dist.get_world_size())
