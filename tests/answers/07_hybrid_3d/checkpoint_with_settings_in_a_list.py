# exercise: 7
# expect: stages overwrite one another's

def save(part, optimizer, folder):
    """Write this rank's share of the model's and the optimizer's state."""
    options = StateDictOptions()
    model, moments = get_state_dict(part, optimizer, options=options)
    dcp.save({"model": model, "optimizer": moments}, checkpoint_id=folder)


def load(part, optimizer, folder):
    """Read what this rank needs of it, into part and optimizer."""
    options = StateDictOptions()
    model, moments = get_state_dict(part, optimizer, options=options)
    state = {"model": model, "optimizer": moments}
    dcp.load(state, checkpoint_id=folder)
    set_state_dict(part, optimizer, model_state_dict=state["model"],
                   optim_state_dict=state["optimizer"], options=options)
