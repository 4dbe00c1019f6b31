# exercise: 2
# expect: all_reduce_then_identity, forward, rank 0: this is the mean of the 2 ranks' parts

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
        return summed / dist.get_world_size()

    @staticmethod
    def backward(ctx, gradient):
        return gradient


identity_then_all_reduce = IdentityThenAllReduce.apply
all_reduce_then_identity = AllReduceThenIdentity.apply
