# exercise: 7
# expect: each rank takes all 12 examples

def mended_epochs(num_examples, num_epochs):
    sampler = DistributedSampler(range(num_examples), num_replicas=1, rank=0, seed=SEED)
    orders = []
    for epoch in range(num_epochs):
        sampler.set_epoch(epoch)
        orders.append(list(sampler))
    return orders


def mended_loop(module, batches):
    broadcast_state(module)
    broken_loop(module, batches)


def mended_heads(module, batches):
    parallel = DistributedDataParallel(module, find_unused_parameters=True)
    steps = []
    for x, y, heads in batches:
        parallel.zero_grad()
        F.mse_loss(parallel(x, heads), y).backward()
        steps.append(gradients(module))
    return steps
