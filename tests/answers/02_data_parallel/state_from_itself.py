# exercise: 3
# expect: rank 1 waits in broadcast from rank 1

def broadcast_state(module):
    for tensor in [*module.parameters(), *module.buffers()]:
        dist.broadcast(tensor.detach(), src=dist.get_rank())
