# exercise: 5
# expect: and identity_then_all_reduce adds nothing forward

def vocabulary_loss(logits_NS, targets_N):
    size = logits_NS.shape[1]
    top_N = logits_NS.detach().amax(dim=1)
    dist.all_reduce(top_N, op=dist.ReduceOp.MAX)
    shifted_NS = logits_NS - top_N[:, None]
    total_N = identity_then_all_reduce(shifted_NS.exp().sum(dim=1))
    places_N = targets_N - dist.get_rank() * size
    mine_N = (places_N >= 0) & (places_N < size)
    places_N = places_N.clamp(0, size - 1)
    found_N = shifted_NS.gather(1, places_N[:, None])[:, 0]
    target_N = identity_then_all_reduce(found_N * mine_N)
    return (total_N.log() - target_N).mean()
