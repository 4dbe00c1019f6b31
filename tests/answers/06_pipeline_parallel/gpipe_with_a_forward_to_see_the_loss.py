# exercise: 2
# expect: rank 0 runs F0 of stage 0 twice

def gpipe(stage):
    stage.scale = 1 / stage.num_micro_batches
    for m in range(stage.num_micro_batches):
        stage.forward(m)
    for m in range(stage.num_micro_batches):
        stage.backward(m)
    stage.forward(0)
    return sum(stage.losses)
