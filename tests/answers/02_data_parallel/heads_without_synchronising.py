# exercise: 7
# expect: every rank still has its own gradients

def mended_epochs(num_examples, num_epochs):
    sampler = DistributedSampler(range(num_examples), seed=SEED)
    orders = []
    for epoch in range(num_epochs):
        sampler.set_epoch(epoch)
        orders.append(list(sampler))
    return orders


def mended_loop(module, batches):
    broadcast_state(module)
    broken_loop(module, batches)


def mended_heads(module, batches):
    parallel, steps = DistributedDataParallel(module), []
    for x, y, heads in batches:
        parallel.zero_grad()
        with parallel.no_sync():
            F.mse_loss(parallel(x, heads), y).backward()
        steps.append(gradients(module))
    return steps
