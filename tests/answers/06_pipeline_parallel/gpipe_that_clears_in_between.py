# exercise: 2
# expect: micro-batch 0, 1 of 3 has no part in the gradient

def gpipe(stage):
    stage.scale = 1 / stage.num_micro_batches
    for m in range(stage.num_micro_batches):
        stage.forward(m)
    for m in range(stage.num_micro_batches):
        stage.part.zero_grad()
        stage.backward(m)
    return sum(stage.losses)
