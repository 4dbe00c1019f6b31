# exercise: 7
# expect: epoch 1 has the order of epoch 0

def mended_epochs(num_examples, num_epochs):
    return broken_epochs(num_examples, num_epochs)


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
