# exercise: 2
# expect: all_reduce_then_identity, backward, rank 0: the ranks' gradients are in it 0.5, 0 times

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
        return gradient / dist.get_world_size()


identity_then_all_reduce = IdentityThenAllReduce.apply
all_reduce_then_identity = AllReduceThenIdentity.apply
