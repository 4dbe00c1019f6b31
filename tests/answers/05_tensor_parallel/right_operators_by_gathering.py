# exercise: 2
# expect: pass

class IdentityThenAllReduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        total = gradient.clone()
        dist.all_reduce(total)
        return total


class AllReduceThenIdentity(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        everyones = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(everyones, x.contiguous())
        return torch.stack(everyones).sum(dim=0)

    @staticmethod
    def backward(ctx, gradient):
        return gradient


identity_then_all_reduce = IdentityThenAllReduce.apply
all_reduce_then_identity = AllReduceThenIdentity.apply
