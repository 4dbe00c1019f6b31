# exercise: 7
# expect: pass

def mended_epochs(num_examples, num_epochs):
    return [list(DistributedSampler(range(num_examples), seed=100 * SEED + epoch)) for epoch in range(num_epochs)]


def mended_loop(module, batches):
    parallel = DistributedDataParallel(module)
    optimizer = torch.optim.SGD(parallel.parameters(), lr=0.1)
    for x, y in batches:
        optimizer.zero_grad()
        F.mse_loss(parallel(x), y).backward()
        optimizer.step()


class Both(nn.Module):
    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, x, heads):
        return self.module(x, heads) + 0 * self.module(x, "both")


def mended_heads(module, batches):
    parallel, steps = DistributedDataParallel(Both(module)), []
    for x, y, heads in batches:
        parallel.zero_grad()
        F.mse_loss(parallel(x, heads), y).backward()
        steps.append(gradients(module))
    return steps
