# exercise: 7
# expect: pass

def entries(zero):
    for unit in zero.units:
        adam = zero.optimizer.state[unit.shard]
        size = sum(p.numel() for p in unit.parameters)
        for kind, tensor in {"shard": unit.shard, **adam}.items():
            yield f"{unit.name}.{kind}", tensor.detach(), size


def checkpoint_of(zero):
    state = {}
    for name, tensor, size in entries(zero):
        state[name] = tensor
        if tensor.dim():
            whole = tensor.new_empty(len(tensor) * dist.get_world_size())
            dist.all_gather_into_tensor(whole, tensor)
            state[name] = whole[:size]
    return state


def save(zero, folder):
    dcp.save(checkpoint_of(zero), checkpoint_id=folder)


def load(zero, folder):
    start_state(zero)
    state = checkpoint_of(zero)
    dcp.load(state, checkpoint_id=folder)
    for name, tensor, size in entries(zero):
        if tensor.dim():
            first = dist.get_rank() * len(tensor)
            piece = state[name][first:first + len(tensor)]
            tensor[:len(piece)] = piece
