# exercise: 3
# expect: the buffers are still each rank's own

def broadcast_state(module):
    for p in module.parameters():
        dist.broadcast(p.detach(), src=0)
