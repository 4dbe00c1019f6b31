# exercise: 3
# expect: x comes whole, the hidden units are this rank's

def shard(linear, dim):
    weight = my_block(linear.weight.detach(), dim)
    bias = linear.bias.detach()
    if dim == 0:
        bias = my_block(bias, 0)
    part = nn.Linear(1, 1)
    part.weight = nn.Parameter(weight.clone())
    part.bias = nn.Parameter(bias.clone())
    return part


class SplitMLP(nn.Module):
    def __init__(self, mlp):
        super().__init__()
        broadcast_state(mlp)
        self.up = shard(mlp.up, 0)
        self.down = shard(mlp.down, 1)

    def forward(self, x_BTD):
        x_BTD = my_block(identity_then_all_reduce(x_BTD), 2)
        hidden_BTM = F.gelu(self.up(x_BTD))
        part_BTD = F.linear(hidden_BTM, self.down.weight)
        return all_reduce_then_identity(part_BTD) + self.down.bias
