# exercise: 5
# expect: it differs at the largest logits alone

def vocabulary_loss(logits_NS, targets_N):
    size = logits_NS.shape[1]
    top_N = logits_NS.amax(dim=1)
    whole_N = top_N.detach().clone()
    dist.all_reduce(whole_N, op=dist.ReduceOp.MAX)
    top_N = torch.where(top_N == whole_N, top_N, whole_N)
    shifted_NS = logits_NS - top_N[:, None]
    total_N = all_reduce_then_identity(shifted_NS.exp().sum(dim=1))
    places_N = targets_N - dist.get_rank() * size
    mine_N = (places_N >= 0) & (places_N < size)
    places_N = places_N.clamp(0, size - 1)
    found_N = shifted_NS.gather(1, places_N[:, None])[:, 0] * mine_N
    target_N = all_reduce_then_identity(found_N)
    return (total_N.log() - target_N).mean()
