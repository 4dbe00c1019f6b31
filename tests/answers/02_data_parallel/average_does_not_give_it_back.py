# exercise: 2
# expect: rank 1 has no gradient for first.weight, but other ranks have one

def average_gradients(module):
    for p in module.parameters():
        if p.requires_grad:
            gradient = torch.zeros_like(p) if p.grad is None else p.grad
            dist.all_reduce(gradient)
            gradient /= dist.get_world_size()
