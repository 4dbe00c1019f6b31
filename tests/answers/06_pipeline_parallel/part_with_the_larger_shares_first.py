# exercise: 1
# expect: stage 0 keeps block 0, 1, it should keep 0: a run

class Part(nn.Module):
    def __init__(self, gpt, stage, num_stages):
        super().__init__()
        self.is_first, self.is_last = stage == 0, stage == num_stages - 1
        share, rest = divmod(len(gpt.blocks), num_stages)
        sizes = [share + (s < rest) for s in range(num_stages)]
        first = sum(sizes[:stage])
        self.blocks = nn.ModuleList(gpt.blocks[first:first + sizes[stage]])
        if self.is_first:
            self.tokens, self.positions = gpt.token_embedding, gpt.position_embedding
        if self.is_last:
            self.end = nn.Sequential(gpt.norm, gpt.head)

    def forward(self, x):
        if self.is_first:
            x = self.tokens(x) + self.positions(torch.arange(x.shape[1], device=x.device))
        for block in self.blocks:
            x = block(x)
        return self.end(x) if self.is_last else x


class Stage(Neighbours):
    def forward(self, m):
        x = self.inputs[m]
        if self.before is not None:
            x = self.receive(self.before, m).requires_grad_()
        y = self.part(x)
        if self.after is None:
            y = GPT.loss(y, self.targets[m]) * self.scale
            self.losses.append(y.detach())
        else:
            self.send(y, self.after)
        self.kept[m] = x, y

    def backward(self, m):
        x, y = self.kept.pop(m)
        if self.after is None:
            y.backward()
        else:
            y.backward(self.receive(self.after, m))
        if self.before is not None:
            self.send(x.grad, self.before)
