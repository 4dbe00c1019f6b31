# exercise: 3
# expect: rank 1 starts its first backward after 4 forwards, in 1F1B after 3

def one_f_one_b(stage):
    stage.scale = 1 / stage.num_micro_batches
    num_warm_up = min(stage.num_stages - 1,
                      stage.num_micro_batches)
    for m in range(num_warm_up):
        stage.forward(m)
    for m in range(stage.num_micro_batches):
        if num_warm_up + m < stage.num_micro_batches:
            stage.forward(num_warm_up + m)
        stage.backward(m)
    return sum(stage.losses)
