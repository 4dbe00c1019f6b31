# exercise: 7
# expect: its settings, such as the learning rate, which only set_state_dict hands back

def save(part, optimizer, folder):
    """Write this rank's share of the model's and the optimizer's state."""
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    model, moments = get_state_dict(part, optimizer, options=options)
    dcp.save({"model": model, "optimizer": moments}, checkpoint_id=folder)


def load(part, optimizer, folder):
    """Read what this rank needs of it, into part and optimizer."""
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    model, moments = get_state_dict(part, optimizer, options=options)
    state = {"model": model, "optimizer": moments}
    dcp.load(state, checkpoint_id=folder)
