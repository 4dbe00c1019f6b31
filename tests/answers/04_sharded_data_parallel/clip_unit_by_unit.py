# exercise: 5
# expect: that is the norm of one unit

def clip_gradients(units, max_norm):
    for unit in units:
        square = unit.shard.grad.square().sum()
        dist.all_reduce(square)
        norm = square.sqrt()
        unit.shard.grad *= (max_norm / norm).clamp(max=1)
    return norm
