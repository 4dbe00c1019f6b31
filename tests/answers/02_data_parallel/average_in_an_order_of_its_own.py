# exercise: 2
# expect: the ranks made their all-reduces in different orders

def average_gradients(module):
    trained = [p for p in module.parameters() if p.requires_grad]
    for p in trained:
        if p.grad is None:
            p.grad = torch.zeros_like(p)
    trained.sort(key=lambda p: (p.numel(), p.grad.sum().item()))
    for p in trained:
        dist.all_reduce(p.grad)
        p.grad /= dist.get_world_size()
