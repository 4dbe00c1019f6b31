# exercise: 5
# expect: windows 0, 1 count twice

def wrap(module):
    return BucketedDDP(module, bucket_bytes=50_000)


def train(parallel, windows, num_steps, batch_size, learning_rate):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    optimizer = torch.optim.SGD(parallel.parameters(), lr=learning_rate)
    losses = []
    for step in range(num_steps):
        mine = [step * batch_size + i for i in DistributedSampler(range(batch_size), shuffle=False)]
        inputs, targets = load(windows, mine)
        optimizer.zero_grad()
        loss = GPT.loss(parallel(inputs), targets)
        share = 1 / world_size
        loss.backward()
        parallel.finish()
        optimizer.step()
        total = loss.detach() * share
        dist.all_reduce(total)
        losses.append(total.item())
    return losses
