# exercise: 6
# expect: divide by the number of micro-batches

def mended_hook(state, bucket):
    half = (bucket.buffer() / dist.get_world_size()).to(torch.bfloat16)
    future = dist.all_reduce(half, async_op=True).get_future()
    return future.then(lambda f: f.value()[0].to(bucket.buffer().dtype))


def mended_accumulate(parallel, micro_batches):
    *others, last = micro_batches
    with parallel.no_sync():
        for x, y in others:
            (F.mse_loss(parallel(x), y)).backward()
    x, y = last
    (F.mse_loss(parallel(x), y)).backward()
