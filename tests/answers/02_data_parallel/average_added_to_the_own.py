# exercise: 2
# expect: the mean is added to the rank's own gradient

def average_gradients(module):
    for p in module.parameters():
        if p.requires_grad:
            if p.grad is None:
                p.grad = torch.zeros_like(p)
            mean = p.grad / dist.get_world_size()
            dist.all_reduce(mean)
            p.grad += mean
