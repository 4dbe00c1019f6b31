# exercise: 2
# expect: the gradient is divided by the number of stages, 2

def gpipe(stage):
    stage.scale = 1 / stage.num_stages
    for m in range(stage.num_micro_batches):
        stage.forward(m)
    for m in range(stage.num_micro_batches):
        stage.backward(m)
    return sum(stage.losses)
