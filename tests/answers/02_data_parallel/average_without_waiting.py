# exercise: 2
# expect: was the all-reduce waited for before its result was used?

def average_gradients(module):
    for p in module.parameters():
        if p.requires_grad:
            g = torch.zeros_like(p) if p.grad is None else p.grad.clone()
            if dist.get_rank():
                time.sleep(0.05)
            work = dist.all_reduce(g, async_op=True)
            p.grad = g / dist.get_world_size()
            work.wait()
