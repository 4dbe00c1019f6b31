# exercise: 5
# expect: clipping makes gradients shorter, never longer

def clip_gradients(units, max_norm):
    square = sum(unit.shard.grad.square().sum() for unit in units)
    dist.all_reduce(square)
    norm = square.sqrt()
    for unit in units:
        unit.shard.grad *= max_norm / norm
    return norm
