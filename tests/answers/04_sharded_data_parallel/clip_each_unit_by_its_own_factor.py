# exercise: 5
# expect: all units alike: is each clipped by a norm of its own?

def clip_gradients(units, max_norm):
    total = 0.0
    for unit in units:
        square = unit.shard.grad.square().sum()
        dist.all_reduce(square)
        unit.shard.grad *= (max_norm / square.sqrt()).clamp(max=1)
        total += square
    return total.sqrt()
