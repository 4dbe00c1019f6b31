# exercise: 5
# expect: pass

def vocabulary_loss(logits_NS, targets_N):
    num_ranks, rank = dist.get_world_size(), dist.get_rank()
    mine_N = logits_NS.logsumexp(dim=1)
    everyones = [torch.empty_like(mine_N) for _ in range(num_ranks)]
    dist.all_gather(everyones, mine_N.detach())
    everyones[rank] = mine_N
    total_N = torch.stack(everyones).logsumexp(dim=0)
    whose_N = targets_N // logits_NS.shape[1]
    found_N = logits_NS.gather(1, (targets_N % logits_NS.shape[1])[:, None])[:, 0]
    target_N = all_reduce_then_identity(found_N * (whose_N == rank))
    return (total_N - target_N).mean()
