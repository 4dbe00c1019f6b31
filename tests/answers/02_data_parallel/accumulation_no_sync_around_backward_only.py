# exercise: 6
# expect: no_sync must be around their forward as well

def mended_hook(state, bucket):
    half = (bucket.buffer() / dist.get_world_size()).to(torch.bfloat16)
    future = dist.all_reduce(half, async_op=True).get_future()
    return future.then(lambda f: f.value()[0].to(bucket.buffer().dtype))


def mended_accumulate(parallel, micro_batches):
    for i, (x, y) in enumerate(micro_batches):
        loss = F.mse_loss(parallel(x), y) / len(micro_batches)
        if i < len(micro_batches) - 1:
            with parallel.no_sync():
                loss.backward()
        else:
            loss.backward()
