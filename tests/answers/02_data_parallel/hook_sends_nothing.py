# exercise: 6
# expect: every rank still has its own gradients

def mended_hook(state, bucket):
    future = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


def mended_accumulate(parallel, micro_batches):
    *others, last = micro_batches
    with parallel.no_sync():
        for x, y in others:
            (F.mse_loss(parallel(x), y) / len(micro_batches)).backward()
    x, y = last
    (F.mse_loss(parallel(x), y) / len(micro_batches)).backward()
