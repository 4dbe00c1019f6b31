# exercise: 2
# expect: pass

def gpipe(stage):
    numbers = range(stage.num_micro_batches)
    for m in numbers:
        stage.forward(m)
    for m in reversed(numbers):  # the latest is still in the cache
        stage.backward(m)
    for p in stage.part.parameters():
        p.grad /= len(numbers)
    if stage.after is None:
        return torch.stack(stage.losses).mean()
