# exercise: 5
# expect: that is the largest of the ranks' norms

def clip_gradients(units, max_norm):
    square = sum(unit.shard.grad.square().sum() for unit in units)
    norm = square.sqrt()
    dist.all_reduce(norm, op=dist.ReduceOp.MAX)
    for unit in units:
        unit.shard.grad *= (max_norm / norm).clamp(max=1)
    return norm
