# exercise: 3
# expect: what rank 2 had: the source must be rank 0

def broadcast_state(module):
    for tensor in [*module.parameters(), *module.buffers()]:
        dist.broadcast(tensor.detach(), src=dist.get_world_size() - 1)
