# exercise: 5
# expect: that is the norm of this rank's shards alone

def clip_gradients(units, max_norm):
    square = sum(unit.shard.grad.square().sum() for unit in units)
    norm = square.sqrt()
    for unit in units:
        unit.shard.grad *= (max_norm / norm).clamp(max=1)
    return norm
