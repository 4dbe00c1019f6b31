# exercise: 2
# expect: has it been float32 on the way?

def average_gradients(module):
    for p in module.parameters():
        if p.requires_grad:
            g = torch.zeros_like(p) if p.grad is None else p.grad
            g = g.float()
            dist.all_reduce(g)
            p.grad = (g / dist.get_world_size()).to(p.dtype)
