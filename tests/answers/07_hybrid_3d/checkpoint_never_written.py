# exercise: 7
# expect: save has written no checkpoint

def save(part, optimizer, folder):
    """Write this rank's share of the model's and the optimizer's state."""
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    model, moments = get_state_dict(part, optimizer, options=options)


def load(part, optimizer, folder):
    """Read what this rank needs of it, into part and optimizer."""
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    model, moments = get_state_dict(part, optimizer, options=options)
    state = {"model": model, "optimizer": moments}
    dcp.load(state, checkpoint_id=folder)
    set_state_dict(part, optimizer, model_state_dict=state["model"],
                   optim_state_dict=state["optimizer"], options=options)
