# exercise: 1
# expect: stage 0 keeps block 0, 2, it should keep 0, 1

class Part(nn.Module):
    def __init__(self, gpt, stage, num_stages):
        super().__init__()
        self.is_first, self.is_last = stage == 0, stage == num_stages - 1
        num_blocks = len(gpt.blocks)
        gpt.blocks = gpt.blocks[stage:num_blocks:num_stages]
        if not self.is_first:
            del gpt.token_embedding, gpt.position_embedding
        if not self.is_last:
            del gpt.norm, gpt.head
        self.gpt = gpt

    def forward(self, x):
        if self.is_first:
            x = self.gpt.embed(x)
        x = self.gpt.apply_blocks(x)
        return self.gpt.predict(x) if self.is_last else x


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
