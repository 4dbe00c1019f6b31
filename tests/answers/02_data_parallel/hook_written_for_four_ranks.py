# exercise: 6
# expect: this is the mean divided by 1.3

def mended_hook(state, bucket):
    half = (bucket.buffer() / 4).to(torch.bfloat16)
    future = dist.all_reduce(half, async_op=True).get_future()
    return future.then(lambda f: f.value()[0].to(bucket.buffer().dtype))


def mended_accumulate(parallel, micro_batches):
    *others, last = micro_batches
    with parallel.no_sync():
        for x, y in others:
            (F.mse_loss(parallel(x), y) / len(micro_batches)).backward()
    x, y = last
    (F.mse_loss(parallel(x), y) / len(micro_batches)).backward()
