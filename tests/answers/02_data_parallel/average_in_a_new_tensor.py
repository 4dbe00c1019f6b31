# exercise: 2
# expect: every rank still has its own gradients

def average_gradients(module):
    for p in module.parameters():
        if p.requires_grad:
            g = torch.zeros_like(p) if p.grad is None else p.grad.clone()
            dist.all_reduce(g)
            g = g / dist.get_world_size()
