# exercise: 2
# expect: it is that of the last micro-batch alone

def gpipe(stage):
    stage.scale = 1 / stage.num_micro_batches
    for m in range(stage.num_micro_batches):
        stage.forward(m)
    for m in range(stage.num_micro_batches):
        stage.backward(m)
    return stage.losses[-1] * stage.num_micro_batches if stage.losses else None
