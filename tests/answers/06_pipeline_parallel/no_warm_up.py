# exercise: 3
# expect: after 1 forward, in 1F1B after 4

def one_f_one_b(stage):
    stage.scale = 1 / stage.num_micro_batches
    num_warm_up = 0
    for m in range(num_warm_up):
        stage.forward(m)
    for m in range(stage.num_micro_batches):
        if num_warm_up + m < stage.num_micro_batches:
            stage.forward(num_warm_up + m)
        stage.backward(m)
    return sum(stage.losses)
