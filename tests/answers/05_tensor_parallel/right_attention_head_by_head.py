# exercise: 4
# expect: pass

class SplitAttention(nn.Module):
    def __init__(self, attention):
        super().__init__()
        self.head_width = attention.head_width
        broadcast_state(attention)
        self.q = shard(attention.q, 0)
        self.k = shard(attention.k, 0)
        self.v = shard(attention.v, 0)
        self.out = shard(attention.out, 1)

    def heads(self, y_BTD):
        return y_BTD.unflatten(-1, (-1, self.head_width)).transpose(1, 2)

    def forward(self, x_BTD):
        x_BTD = identity_then_all_reduce(x_BTD)
        q, k, v = self.q(x_BTD), self.k(x_BTD), self.v(x_BTD)
        later = torch.ones(q.shape[1], q.shape[1], dtype=torch.bool, device=q.device).triu(1)
        heads = []
        for start in range(0, q.shape[2], self.head_width):
            head = slice(start, start + self.head_width)
            scores = q[..., head] @ k[..., head].mT / self.head_width**0.5
            heads.append(scores.masked_fill(later, -torch.inf).softmax(-1) @ v[..., head])
        part_BTD = torch.cat(heads, dim=-1) @ self.out.weight.T
        return all_reduce_then_identity(part_BTD) + self.out.bias
