# exercise: 7
# expect: Expected to have finished reduction in the prior iteration

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
    return broken_heads(module, batches)
