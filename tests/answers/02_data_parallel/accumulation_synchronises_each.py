# exercise: 6
# expect: the gradients are right, but took 3 all-reduces: those of

def mended_hook(state, bucket):
    half = (bucket.buffer() / dist.get_world_size()).to(torch.bfloat16)
    future = dist.all_reduce(half, async_op=True).get_future()
    return future.then(lambda f: f.value()[0].to(bucket.buffer().dtype))


def mended_accumulate(parallel, micro_batches):
    for x, y in micro_batches:
        (F.mse_loss(parallel(x), y) / len(micro_batches)).backward()
