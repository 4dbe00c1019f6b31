# exercise: 2
# expect: nobody runs B2 or I2 of stage 0

def gpipe(stage):
    stage.scale = 1 / stage.num_micro_batches
    for m in range(stage.num_micro_batches):
        stage.forward(m)
    for m in range(stage.num_micro_batches - 1):
        stage.backward(m)
    return sum(stage.losses)
