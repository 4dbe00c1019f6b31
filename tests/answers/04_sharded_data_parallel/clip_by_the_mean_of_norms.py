# exercise: 5
# expect: that is the mean of the ranks' norms

def clip_gradients(units, max_norm):
    square = sum(unit.shard.grad.square().sum() for unit in units)
    norm = square.sqrt()
    dist.all_reduce(norm)
    norm /= dist.get_world_size()
    for unit in units:
        unit.shard.grad *= (max_norm / norm).clamp(max=1)
    return norm
