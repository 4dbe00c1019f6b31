# exercise: 3
# expect: a leaf Variable that requires grad is being used in an in-place operation

def broadcast_state(module):
    for tensor in [*module.parameters(), *module.buffers()]:
        new = tensor.detach().clone()
        dist.broadcast(new, src=0)
        tensor.copy_(new)
