# exercise: 5
# expect: pass

def clip_gradients(units, max_norm):
    gradients = [unit.shard.grad for unit in units]
    norm = nn.utils.get_total_norm(gradients)
    norms = [torch.empty_like(norm) for _ in range(dist.get_world_size())]
    dist.all_gather(norms, norm)
    norm = torch.stack(norms).norm()
    nn.utils.clip_grads_with_norm_([unit.shard for unit in units], max_norm, norm)
    return norm.item()
