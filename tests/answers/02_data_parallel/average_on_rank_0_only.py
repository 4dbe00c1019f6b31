# exercise: 2
# expect: only rank 0 holds the mean

def average_gradients(module):
    for p in module.parameters():
        if p.requires_grad:
            if p.grad is None:
                p.grad = torch.zeros_like(p)
            dist.reduce(p.grad, dst=0)
            if dist.get_rank() == 0:
                p.grad /= dist.get_world_size()
