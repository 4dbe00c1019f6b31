# exercise: 2
# expect: GPipe runs all forwards first

def gpipe(stage):
    stage.scale = 1 / stage.num_micro_batches
    for m in range(stage.num_micro_batches):
        stage.forward(m)
        stage.backward(m)
    return sum(stage.losses)
