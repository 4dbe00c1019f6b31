# exercise: 5
# expect: that is the root of the mean of the ranks' squares

def clip_gradients(units, max_norm):
    square = sum(unit.shard.grad.square().sum() for unit in units)
    dist.all_reduce(square)
    norm = (square / dist.get_world_size()).sqrt()
    for unit in units:
        unit.shard.grad *= (max_norm / norm).clamp(max=1)
    return norm
