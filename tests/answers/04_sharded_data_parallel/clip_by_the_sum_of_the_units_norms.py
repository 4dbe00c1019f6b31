# exercise: 5
# expect: norms don't add, their squares do

def clip_gradients(units, max_norm):
    norm = sum(unit.shard.grad.norm() for unit in units)
    dist.all_reduce(norm)
    for unit in units:
        unit.shard.grad *= (max_norm / norm).clamp(max=1)
    return norm
