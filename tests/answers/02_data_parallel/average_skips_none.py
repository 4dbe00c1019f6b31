# exercise: 2
# expect: a rank that has no gradient for it left its all-reduce out

def average_gradients(module):
    for p in module.parameters():
        if p.grad is not None:
            dist.all_reduce(p.grad)
            p.grad /= dist.get_world_size()
