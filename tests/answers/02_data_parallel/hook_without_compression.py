# exercise: 6
# expect: numbers of 24 significant bits, not of 8

def mended_hook(state, bucket):
    mean = bucket.buffer() / dist.get_world_size()
    return dist.all_reduce(mean, async_op=True).get_future().then(lambda f: f.value()[0])


def mended_accumulate(parallel, micro_batches):
    *others, last = micro_batches
    with parallel.no_sync():
        for x, y in others:
            (F.mse_loss(parallel(x), y) / len(micro_batches)).backward()
    x, y = last
    (F.mse_loss(parallel(x), y) / len(micro_batches)).backward()
