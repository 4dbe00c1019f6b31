# exercise: 6
# expect: times the mean, which is more than rounding does

def mended_hook(state, bucket):
    half = bucket.buffer().bfloat16()
    work = dist.all_reduce(half, async_op=True)

    def back(future):
        return (future.value()[0].double() / dist.get_world_size() * 0.985).to(bucket.buffer().dtype)

    return work.get_future().then(back)


import contextlib


def mended_accumulate(parallel, micro_batches):
    for left, (x, y) in zip(reversed(range(len(micro_batches))), micro_batches):
        with parallel.no_sync() if left else contextlib.nullcontext():
            F.mse_loss(parallel(x), y).backward()
    for p in parallel.parameters():
        p.grad /= len(micro_batches)
