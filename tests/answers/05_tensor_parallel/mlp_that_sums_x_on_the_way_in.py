# exercise: 3
# expect: rank 0's output is wrong: it is no sum of what the ranks' parts give

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
        x_BTD = all_reduce_then_identity(x_BTD)
        hidden_BTM = F.gelu(self.up(x_BTD))
        part_BTD = F.linear(hidden_BTM, self.down.weight)
        return all_reduce_then_identity(part_BTD) + self.down.bias
