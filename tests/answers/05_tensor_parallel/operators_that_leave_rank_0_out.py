# exercise: 2
# expect: rank 1 waits in all_reduce at cell

class IdentityThenAllReduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        total = gradient.clone()
        if dist.get_rank() > 0:
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


identity_then_all_reduce = IdentityThenAllReduce.apply
all_reduce_then_identity = AllReduceThenIdentity.apply
