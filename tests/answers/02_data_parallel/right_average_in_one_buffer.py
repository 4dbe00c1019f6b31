# exercise: 2
# expect: pass

def average_gradients(module):
    trained = [p for p in module.parameters() if p.requires_grad]
    flat = torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in trained])
    dist.all_reduce(flat)
    flat /= dist.get_world_size()
    for p, piece in zip(trained, flat.split([p.numel() for p in trained])):
        p.grad = piece.view_as(p).clone()
