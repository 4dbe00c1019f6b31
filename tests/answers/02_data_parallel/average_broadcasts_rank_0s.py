# exercise: 2
# expect: every rank holds rank 0's gradients

def average_gradients(module):
    for p in module.parameters():
        if p.requires_grad:
            if p.grad is None:
                p.grad = torch.zeros_like(p)
            dist.broadcast(p.grad, src=0)
