# exercise: 3
# expect: dist.get_rank() counts in the world

def cut(linear, dim, group):
    """This rank's part of an nn.Linear whose weight is cut along `dim`."""
    place, size = dist.get_rank(), dist.get_world_size(group)
    weight, bias = linear.weight.detach(), linear.bias.detach()
    weight = weight.chunk(size, dim)[place]
    if dim == 0:
        bias = bias.chunk(size)[place]
    part = nn.Linear(weight.shape[1], weight.shape[0], device="meta")
    part.weight = nn.Parameter(weight.clone())
    part.bias = nn.Parameter(bias.clone())
    return part


class SplitAttention(nn.Module):
    """This rank's heads of causal self-attention; (B, T, D) both ways."""

    def __init__(self, attention, group):
        super().__init__()
        self.head_width, self.group = attention.head_width, group
        self.q = cut(attention.q, 0, group)
        self.k = cut(attention.k, 0, group)
        self.v = cut(attention.v, 0, group)
        self.out = cut(attention.out, 1, group)

    def forward(self, x_BTD):
        x_BTD = identity_then_all_reduce(x_BTD, self.group)
        q_BHTK, k_BHTK, v_BHTK = (
            project(x_BTD).unflatten(-1, (-1, self.head_width)).transpose(1, 2)
            for project in (self.q, self.k, self.v))
        y_BHTK = F.scaled_dot_product_attention(q_BHTK, k_BHTK, v_BHTK,
                                                is_causal=True)
        y_BTD = F.linear(y_BHTK.transpose(1, 2).flatten(2), self.out.weight)
        return all_reduce_then_identity(y_BTD, self.group) + self.out.bias


class SplitMLP(nn.Module):
    """This rank's hidden units of an MLP; (B, T, D) both ways."""

    def __init__(self, mlp, group):
        super().__init__()
        self.group = group
        self.up, self.down = cut(mlp.up, 0, group), cut(mlp.down, 1, group)

    def forward(self, x_BTD):
        x_BTD = identity_then_all_reduce(x_BTD, self.group)
        y_BTD = F.linear(F.gelu(self.up(x_BTD)), self.down.weight)
        return all_reduce_then_identity(y_BTD, self.group) + self.down.bias


def cut_block(block, group):
    """Cut a block of the GPT in place; its norms stay whole."""
    block.attention = SplitAttention(block.attention, group)
    block.mlp = SplitMLP(block.mlp, group)
