# exercise: 3
# expect: every tensor is as it was

def broadcast_state(module):
    for tensor in [*module.parameters(), *module.buffers()]:
        dist.broadcast(tensor.detach().clone(), src=0)
