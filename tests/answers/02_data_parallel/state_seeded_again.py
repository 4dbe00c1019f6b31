# exercise: 3
# expect: rank 0's 0.weight has changed

def broadcast_state(module):
    torch.manual_seed(0)
    for layer in module.children():
        layer.reset_parameters()
