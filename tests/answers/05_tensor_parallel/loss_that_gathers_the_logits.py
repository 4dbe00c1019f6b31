# exercise: 5
# expect: logits are sent round

def vocabulary_loss(logits_NS, targets_N):
    parts = [torch.empty_like(logits_NS) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, logits_NS.detach())
    parts[dist.get_rank()] = logits_NS
    return F.cross_entropy(torch.cat(parts, dim=1), targets_N)
