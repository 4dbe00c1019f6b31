# exercise: 5
# expect: return the norm from before clipping

def clip_gradients(units, max_norm):
    square = sum(unit.shard.grad.square().sum() for unit in units)
    dist.all_reduce(square)
    norm = square.sqrt()
    for unit in units:
        unit.shard.grad *= (max_norm / norm).clamp(max=1)
    return norm.clamp(max=max_norm)
