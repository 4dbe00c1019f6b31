# exercise: 5
# expect: rank r's block of V/R tokens begins at r V/R

def vocabulary_loss(logits_NS, targets_N):
    size = logits_NS.shape[1]
    top_N = logits_NS.detach().amax(dim=1)
    dist.all_reduce(top_N, op=dist.ReduceOp.MAX)
    shifted_NS = logits_NS - top_N[:, None]
    total_N = all_reduce_then_identity(shifted_NS.exp().sum(dim=1))
    places_N = targets_N - dist.get_rank() * size
    mine_N = (places_N >= 0) & (places_N < size)
    places_N = targets_N
    found_N = shifted_NS.gather(1, places_N[:, None])[:, 0] * mine_N
    target_N = all_reduce_then_identity(found_N)
    return (total_N.log() - target_N).mean()
