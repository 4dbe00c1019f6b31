# exercise: 5
# expect: the first step is right to six digits only

def wrap(module):
    return BucketedDDP(module, bucket_bytes=50_000)


def train(parallel, windows, num_steps, batch_size, learning_rate):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    parallel.float()
    optimizer = torch.optim.SGD(parallel.parameters(), lr=learning_rate)
    losses = []
    for step in range(num_steps):
        numbers = range(step * batch_size, (step + 1) * batch_size)
        mine = numbers[rank::world_size]
        inputs, targets = load(windows, mine)
        optimizer.zero_grad()
        loss = GPT.loss(parallel(inputs), targets)
        share = len(mine) / batch_size
        (loss * len(mine) / batch_size * world_size).backward()
        parallel.finish()
        optimizer.step()
        total = loss.detach() * share
        dist.all_reduce(total)
        losses.append(total.item())
    return losses
