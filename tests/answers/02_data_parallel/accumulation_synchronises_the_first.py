# exercise: 6
# expect: the other ranks' micro-batches 1, 2 are not in it

def mended_hook(state, bucket):
    half = (bucket.buffer() / dist.get_world_size()).to(torch.bfloat16)
    future = dist.all_reduce(half, async_op=True).get_future()
    return future.then(lambda f: f.value()[0].to(bucket.buffer().dtype))


def mended_accumulate(parallel, micro_batches):
    first, *others = micro_batches
    x, y = first
    (F.mse_loss(parallel(x), y) / len(micro_batches)).backward()
    with parallel.no_sync():
        for x, y in others:
            (F.mse_loss(parallel(x), y) / len(micro_batches)).backward()
