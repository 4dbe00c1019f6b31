# exercise: 2
# expect: rank 0 issued 6 collectives and never waited for 5

def average_gradients(module):
    works = []
    for p in module.parameters():
        if p.requires_grad:
            if p.grad is None:
                p.grad = torch.zeros_like(p)
            works.append(dist.all_reduce(p.grad, async_op=True))
    works[-1].wait()
    for p in module.parameters():
        if p.requires_grad:
            p.grad /= dist.get_world_size()
