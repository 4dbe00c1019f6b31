# exercise: 3
# expect: rank 0 ends after 9 of its 12 actions

def one_f_one_b(stage):
    stage.scale = 1 / stage.num_micro_batches
    num_warm_up = min(stage.num_stages - 1 - stage.stage, stage.num_micro_batches)
    for m in range(num_warm_up):
        stage.forward(m)
    for m in range(stage.num_micro_batches - num_warm_up):
        stage.forward(num_warm_up + m)
        stage.backward(m)
    return sum(stage.losses)
