# exercise: 5
# expect: that is the square of the norm

def clip_gradients(units, max_norm):
    square = sum(unit.shard.grad.square().sum() for unit in units)
    dist.all_reduce(square)
    norm = square
    for unit in units:
        unit.shard.grad *= (max_norm / norm).clamp(max=1)
    return norm
