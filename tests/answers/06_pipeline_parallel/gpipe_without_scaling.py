# exercise: 2
# expect: stage 1: the gradients of 3 micro-batches add up, and each is that of a mean

def gpipe(stage):
    for m in range(stage.num_micro_batches):
        stage.forward(m)
    for m in range(stage.num_micro_batches):
        stage.backward(m)
    return sum(stage.losses) / stage.num_micro_batches
