# exercise: 3
# expect: have you put new ones in their place?

def broadcast_state(module):
    for layer in module.children():
        for name, p in list(layer.named_parameters(recurse=False)):
            new = p.detach().clone()
            dist.broadcast(new, src=0)
            setattr(layer, name, nn.Parameter(new))
    for buffer in module.buffers():
        dist.broadcast(buffer, src=0)
