# exercise: 5
# expect: pass

class VocabularyLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, targets):
        num, size = logits.shape
        first = dist.get_rank() * size
        top = logits.amax(dim=1)
        dist.all_reduce(top, op=dist.ReduceOp.MAX)
        tokens = torch.arange(first, first + size, device=logits.device)
        chosen = (tokens == targets[:, None]).to(logits.dtype)
        powers = (logits - top[:, None]).exp()
        sums = torch.stack([powers.sum(dim=1), (chosen * logits).sum(dim=1)])
        dist.all_reduce(sums)
        ctx.save_for_backward((powers / sums[0][:, None] - chosen) / num)
        return (sums[0].log() + top - sums[1]).mean()

    @staticmethod
    def backward(ctx, gradient):
        return ctx.saved_tensors[0] * gradient, None


def vocabulary_loss(logits_NS, targets_N):
    return VocabularyLoss.apply(logits_NS, targets_N)
