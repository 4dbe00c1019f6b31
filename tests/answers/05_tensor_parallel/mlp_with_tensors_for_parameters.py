# exercise: 3
# expect: rank 0's module has no parameter up.weight

def shard(linear, dim):
    weight = my_block(linear.weight.detach(), dim)
    bias = linear.bias.detach()
    if dim == 0:
        bias = my_block(bias, 0)
    return weight.clone(), bias.clone()


class SplitMLP(nn.Module):
    def __init__(self, mlp):
        super().__init__()
        broadcast_state(mlp)
        self.up = shard(mlp.up, 0)
        self.down = shard(mlp.down, 1)

    def forward(self, x_BTD):
        x_BTD = identity_then_all_reduce(x_BTD)
        hidden_BTM = F.gelu(F.linear(x_BTD, *self.up))
        part_BTD = F.linear(hidden_BTM, self.down[0])
        return all_reduce_then_identity(part_BTD) + self.down[1]
