# exercise: 5
# expect: A target outside it is not looked up there at all

def vocabulary_loss(logits_NS, targets_N):
    size = logits_NS.shape[1]
    top_N = logits_NS.detach().amax(dim=1)
    dist.all_reduce(top_N, op=dist.ReduceOp.MAX)
    shifted_NS = logits_NS - top_N[:, None]
    total_N = all_reduce_then_identity(shifted_NS.exp().sum(dim=1))
    places_N = targets_N - dist.get_rank() * size
    mine_N = (places_N >= 0) & (places_N < size)
    found_N = shifted_NS.gather(1, places_N[:, None])[:, 0]
    target_N = all_reduce_then_identity(found_N)
    return (total_N.log() - target_N).mean()
