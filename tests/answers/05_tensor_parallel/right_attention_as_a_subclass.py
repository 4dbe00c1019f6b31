# exercise: 4
# expect: pass

class RowLinear(nn.Linear):
    def forward(self, x):
        return all_reduce_then_identity(F.linear(x, self.weight)) + self.bias


class SplitAttention(Attention):
    def __init__(self, attention):
        nn.Module.__init__(self)
        broadcast_state(attention)
        self.head_width, self.dropout = attention.head_width, attention.dropout
        for name in ("q", "k", "v", "out"):
            setattr(self, name, shard(getattr(attention, name), int(name == "out")))
        self.out.__class__ = RowLinear

    def forward(self, x_BTD):
        return super().forward(identity_then_all_reduce(x_BTD))
