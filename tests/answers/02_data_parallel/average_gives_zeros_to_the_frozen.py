# exercise: 2
# expect: now has a gradient for frozen.weight, which is frozen

def average_gradients(module):
    for p in module.parameters():
        if p.grad is None:
            p.grad = torch.zeros_like(p)
        dist.all_reduce(p.grad)
        p.grad /= dist.get_world_size()
