# exercise: 3
# expect: rank 1 still has its own 2.weight

def broadcast_state(module):
    for tensor in [*module.parameters(), *module.buffers()]:
        if tensor.requires_grad or tensor in set(module.buffers()):
            dist.broadcast(tensor.detach(), src=0)
