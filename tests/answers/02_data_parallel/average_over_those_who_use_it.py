# exercise: 2
# expect: this is the mean over the 2 ranks that have a gradient

def average_gradients(module):
    for p in module.parameters():
        if not p.requires_grad:
            continue
        used = torch.tensor(float(p.grad is not None), device=p.device)
        if p.grad is None:
            p.grad = torch.zeros_like(p)
        dist.all_reduce(used)
        dist.all_reduce(p.grad)
        p.grad /= max(used.item(), 1)
