# exercise: 5
# expect: pass

class Counted(nn.Module):
    def __init__(self, module):
        super().__init__()
        self.module = module
        broadcast_state(module)

    def forward(self, *inputs):
        return self.module(*inputs)


def wrap(module):
    return Counted(module)


def train(parallel, windows, num_steps, batch_size, learning_rate):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    optimizer = torch.optim.SGD(parallel.parameters(), lr=learning_rate)
    losses = []
    for step in range(num_steps):
        mine = [step * batch_size + i for i in range(batch_size) if i % world_size == rank]
        inputs, targets = load(windows, mine)
        optimizer.zero_grad()
        (GPT.loss(parallel(inputs), targets) * len(mine)).backward()
        for p in parallel.parameters():
            dist.all_reduce(p.grad)
            p.grad /= batch_size
        with torch.no_grad():
            optimizer_free = [p.detach().clone() for p in parallel.parameters()]
            sums = torch.stack([GPT.loss(parallel(inputs), targets) * len(mine),
                                torch.tensor(float(len(mine)), device=inputs.device).double()])
        dist.all_reduce(sums)
        losses.append((sums[0] / sums[1]).item())
        optimizer.step()
    return losses
