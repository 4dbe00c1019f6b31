# exercise: 3
# expect: IndexError: tuple index out of range

def one_f_one_b(stage):
    stage.scale = 1 / stage.num_micro_batches
    num_warm_up = stage.num_stages - 1 - stage.stage
    for m in range(num_warm_up):
        stage.forward(m)
    for m in range(stage.num_micro_batches):
        if num_warm_up + m < stage.num_micro_batches:
            stage.forward(num_warm_up + m)
        stage.backward(m)
    return sum(stage.losses)
