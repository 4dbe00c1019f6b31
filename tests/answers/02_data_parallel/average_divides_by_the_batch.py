# exercise: 2
# expect: the mean is divided by the 5 examples of a batch

def average_gradients(module):
    for p in module.parameters():
        if p.requires_grad:
            if p.grad is None:
                p.grad = torch.zeros_like(p)
            dist.all_reduce(p.grad)
            p.grad /= 5 * dist.get_world_size()
