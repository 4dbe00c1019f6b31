# exercise: 2
# expect: pass

class IdentityThenAllReduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.group = dist.group.WORLD
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        total = gradient.contiguous().clone()
        dist.all_reduce(total, group=ctx.group)
        return total


class AllReduceThenIdentity(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        summed = x.clone()
        dist.all_reduce(summed)
        return summed

    @staticmethod
    def backward(ctx, gradient):
        return gradient


identity_then_all_reduce = IdentityThenAllReduce.apply
all_reduce_then_identity = AllReduceThenIdentity.apply
