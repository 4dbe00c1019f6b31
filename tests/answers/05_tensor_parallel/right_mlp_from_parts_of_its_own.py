# exercise: 3
# expect: pass

class ColumnLinear(nn.Linear):
    def forward(self, x):
        return super().forward(identity_then_all_reduce(x))


class RowLinear(nn.Linear):
    def forward(self, x):
        return all_reduce_then_identity(F.linear(x, self.weight)) + self.bias


def shard(linear, dim):
    state = {"weight": my_block(linear.weight.data, dim), "bias": linear.bias.data}
    if dim == 0:
        state["bias"] = my_block(state["bias"], 0)
    outputs, inputs = state["weight"].shape
    part = nn.Linear(inputs, outputs).to(linear.weight)
    part.load_state_dict(state)
    return part


class SplitMLP(nn.Module):
    def __init__(self, mlp):
        super().__init__()
        broadcast_state(mlp)
        self.up, self.down = shard(mlp.up, 0), shard(mlp.down, 1)
        self.up.__class__, self.down.__class__ = ColumnLinear, RowLinear

    def forward(self, x_BTD):
        return self.down(F.gelu(self.up(x_BTD)))
