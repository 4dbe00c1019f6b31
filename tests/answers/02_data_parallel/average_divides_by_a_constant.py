# exercise: 2
# expect: this is 1.5 times the mean

def average_gradients(module):
    for p in module.parameters():
        if p.requires_grad:
            if p.grad is None:
                p.grad = torch.zeros_like(p)
            dist.all_reduce(p.grad)
            p.grad /= 2
