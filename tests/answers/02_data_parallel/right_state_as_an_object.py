# exercise: 3
# expect: pass

def broadcast_state(module):
    box = [module.state_dict() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(box, src=0)
    module.load_state_dict(box[0])
