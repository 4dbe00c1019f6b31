# exercise: 2
# expect: pass

def average_gradients(module):
    for p in module.parameters():
        if p.requires_grad:
            own = torch.zeros_like(p) if p.grad is None else p.grad
            everybody = [torch.empty_like(p) for _ in range(dist.get_world_size())]
            dist.all_gather(everybody, own)
            p.grad = torch.stack(everybody).mean(dim=0).detach()
