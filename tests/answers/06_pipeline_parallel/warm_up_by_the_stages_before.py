# exercise: 3
# expect: rank 0 stands at B0, action 2 of its 12, which in 1F1B is F1

def one_f_one_b(stage):
    stage.scale = 1 / stage.num_micro_batches
    num_warm_up = min(stage.stage,
                      stage.num_micro_batches)
    for m in range(num_warm_up):
        stage.forward(m)
    for m in range(stage.num_micro_batches):
        if num_warm_up + m < stage.num_micro_batches:
            stage.forward(num_warm_up + m)
        stage.backward(m)
    return sum(stage.losses)
