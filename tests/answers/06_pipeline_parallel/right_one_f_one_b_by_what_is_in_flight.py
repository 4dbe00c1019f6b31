# exercise: 3
# expect: pass

def one_f_one_b(stage):
    stage.scale = 1 / stage.num_micro_batches
    limit = stage.num_stages - stage.stage
    forward = backward = 0
    while backward < stage.num_micro_batches:
        if forward < stage.num_micro_batches and forward - backward < limit:
            stage.forward(forward)
            forward += 1
        else:
            stage.backward(backward)
            backward += 1
    return sum(stage.losses)
