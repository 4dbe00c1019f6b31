# exercise: 3
# expect: pass

def broadcast_state(module):
    with torch.no_grad():
        for tensor in module.state_dict().values():
            dist.broadcast(tensor, src=0)
