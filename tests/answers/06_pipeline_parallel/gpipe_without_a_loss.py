# exercise: 2
# expect: the last stage returned no loss

def gpipe(stage):
    stage.scale = 1 / stage.num_micro_batches
    for m in range(stage.num_micro_batches):
        stage.forward(m)
    for m in range(stage.num_micro_batches):
        stage.backward(m)
