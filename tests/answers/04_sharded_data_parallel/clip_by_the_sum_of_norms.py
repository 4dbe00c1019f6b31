# exercise: 5
# expect: Squares add up, norms don't

def clip_gradients(units, max_norm):
    square = sum(unit.shard.grad.square().sum() for unit in units)
    norm = square.sqrt()
    dist.all_reduce(norm)
    for unit in units:
        unit.shard.grad *= (max_norm / norm).clamp(max=1)
    return norm
