# exercise: 3
# expect: rank 0's 0.weight is now the mean over ranks

def broadcast_state(module):
    for tensor in [*module.parameters(), *module.buffers()]:
        mean = tensor.detach().double() / dist.get_world_size()
        dist.all_reduce(mean)
        tensor.data.copy_(mean)
