# exercise: 3
# expect: rank 1 still has its own 1.num_batches_tracked

def broadcast_state(module):
    for tensor in module.state_dict().values():
        if tensor.is_floating_point():
            dist.broadcast(tensor, src=0)
