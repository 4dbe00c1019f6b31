# exercise: 5
# expect: ranks put 20 windows through the model, the batch has 10: each rank takes its own share

def wrap(module):
    broadcast_state(module)
    return module


def train(parallel, windows, num_steps, batch_size, learning_rate):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    optimizer = torch.optim.SGD(parallel.parameters(), lr=learning_rate)
    losses = []
    for step in range(num_steps):
        numbers = range(step * batch_size, (step + 1) * batch_size)
        inputs, targets = load(windows, numbers)
        optimizer.zero_grad()
        loss = GPT.loss(parallel(inputs), targets)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses
