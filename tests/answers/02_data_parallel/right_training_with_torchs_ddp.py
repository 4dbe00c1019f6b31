# exercise: 5
# expect: pass

def wrap(module):
    return DistributedDataParallel(module)


def train(parallel, windows, num_steps, batch_size, learning_rate):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    optimizer = torch.optim.SGD(parallel.parameters(), lr=learning_rate)
    losses = torch.zeros(num_steps, dtype=torch.float64, device=rank_device())
    for step in range(num_steps):
        edges = [batch_size * r // world_size + step * batch_size for r in (rank, rank + 1)]
        inputs, targets = load(windows, range(*edges))
        loss = F.cross_entropy(parallel(inputs).flatten(0, 1), targets.flatten(), reduction="sum")
        loss = loss / (batch_size * inputs.shape[1])
        parallel.zero_grad()
        (loss * world_size).backward()
        optimizer.step()
        losses[step] = loss.detach()
    dist.all_reduce(losses)
    return losses.tolist()
