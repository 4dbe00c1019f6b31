# exercise: 3
# expect: has the shape (20, 24), its block has (10, 24)

def shard(linear, dim):
    weight = linear.weight.detach().chunk(2, dim)[dist.get_rank() % 2]
    bias = linear.bias.detach()
    if dim == 0:
        bias = bias.chunk(2)[dist.get_rank() % 2]
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
        x_BTD = identity_then_all_reduce(x_BTD)
        hidden_BTM = F.gelu(self.up(x_BTD))
        part_BTD = F.linear(hidden_BTM, self.down.weight)
        return all_reduce_then_identity(part_BTD) + self.down.bias
