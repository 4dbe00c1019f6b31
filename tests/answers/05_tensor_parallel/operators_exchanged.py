# exercise: 2
# expect: identity_then_all_reduce, forward, rank 0: this is the sum over the ranks

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
        summed = x.clone()
        dist.all_reduce(summed)
        return summed

    @staticmethod
    def backward(ctx, gradient):
        return gradient


identity_then_all_reduce = AllReduceThenIdentity.apply
all_reduce_then_identity = IdentityThenAllReduce.apply
