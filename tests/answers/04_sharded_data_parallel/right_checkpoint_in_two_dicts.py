# exercise: 7
# expect: pass

def sharded(unit, tensor):
    mesh = init_device_mesh(rank_device().type, (dist.get_world_size(),))
    size = sum(p.numel() for p in unit.parameters)
    return DTensor.from_local(mine(unit, tensor), mesh, [Shard(0)], run_check=False, shape=(size,), stride=(1,))


def checkpoint_of(zero):
    model = {unit.name: sharded(unit, unit.shard) for unit in zero.units}
    adam = {unit.name: {kind: sharded(unit, tensor) if tensor.dim() else tensor
                        for kind, tensor in zero.optimizer.state[unit.shard].items()} for unit in zero.units}
    return {"model": model, "optimizer": adam}


def save(zero, folder):
    dcp.save(checkpoint_of(zero), checkpoint_id=folder)


def load(zero, folder):
    start_state(zero)
    dcp.load(checkpoint_of(zero), checkpoint_id=folder)
