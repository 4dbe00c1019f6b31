# exercise: 2
# expect: pass

def average_gradients(module):
    trained = [p for p in module.parameters() if p.requires_grad]
    used = torch.tensor([float(p.grad is not None) for p in trained], device=trained[0].device)
    dist.all_reduce(used)
    for p, num_ranks in zip(trained, used.tolist()):
        if num_ranks:
            gradient = torch.zeros_like(p) if p.grad is None else p.grad / dist.get_world_size()
            dist.all_reduce(gradient)
            p.grad = gradient
