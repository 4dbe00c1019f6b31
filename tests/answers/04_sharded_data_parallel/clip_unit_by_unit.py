# exercise: 5
# expect: times what it should be

def clip_gradients(units, max_norm):
    for unit in units:
        square = unit.shard.grad.square().sum()
        dist.all_reduce(square)
        norm = square.sqrt()
        unit.shard.grad *= (max_norm / norm).clamp(max=1)
    return norm
