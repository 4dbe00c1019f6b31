# exercise: 3
# expect: pass

def shard(linear, dim):
    linear.weight.data = my_block(linear.weight.data, dim).clone()
    if dim == 0:
        linear.bias.data = my_block(linear.bias.data, 0).clone()
    return linear


class SplitMLP(MLP):
    def __init__(self, mlp):
        nn.Module.__init__(self)
        broadcast_state(mlp)
        self.up = shard(mlp.up, 0)
        self.down = shard(mlp.down, 1)

    def forward(self, x_BTD):
        hidden_BTM = F.gelu(self.up(IdentityThenAllReduce.apply(x_BTD)))
        return AllReduceThenIdentity.apply(hidden_BTM @ self.down.weight.mT) + self.down.bias
