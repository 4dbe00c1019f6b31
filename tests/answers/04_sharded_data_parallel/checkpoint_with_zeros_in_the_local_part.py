# exercise: 7
# expect: mine(unit, tensor) does

def checkpoint_of(zero):
    """name -> tensor, for all that a rank has of the training's state."""
    mesh = init_device_mesh(rank_device().type, (dist.get_world_size(),))
    state = {}
    for unit in zero.units:
        size = sum(p.numel() for p in unit.parameters)
        adam = zero.optimizer.state[unit.shard]
        for kind, tensor in [("shard", unit.shard),
                             ("exp_avg", adam["exp_avg"]),
                             ("exp_avg_sq", adam["exp_avg_sq"])]:
            state[f"{unit.name}.{kind}"] = DTensor.from_local(
                tensor.detach(), mesh, [Shard(0)], run_check=False,
                shape=(size,), stride=(1,))
        state[f"{unit.name}.step"] = adam["step"]
    return state


def save(zero, folder):
    """Write a checkpoint."""
    dcp.save(checkpoint_of(zero), checkpoint_id=folder)


def load(zero, folder):
    """Put what a checkpoint holds into a Zero3 that was just made."""
    start_state(zero)
    dcp.load(checkpoint_of(zero), checkpoint_id=folder)
