# exercise: 6
# expect: nothing of the other ranks is in the gradients: one backward

def mended_hook(state, bucket):
    half = (bucket.buffer() / dist.get_world_size()).to(torch.bfloat16)
    future = dist.all_reduce(half, async_op=True).get_future()
    return future.then(lambda f: f.value()[0].to(bucket.buffer().dtype))


def mended_accumulate(parallel, micro_batches):
    with parallel.no_sync():
        for x, y in micro_batches:
            (F.mse_loss(parallel(x), y) / len(micro_batches)).backward()
