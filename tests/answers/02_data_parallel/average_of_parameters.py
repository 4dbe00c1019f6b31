# exercise: 2
# expect: average gradients (p.grad), not parameters

def average_gradients(module):
    for p in module.parameters():
        dist.all_reduce(p.data)
        p.data /= dist.get_world_size()
