# exercise: 3
# expect: rank 0's action 5 is B3 of stage 0, in 1F1B it is B0 of stage 0

def one_f_one_b(stage):
    stage.scale = 1 / stage.num_micro_batches
    flying = []
    for m in range(stage.num_micro_batches):
        stage.forward(m)
        flying.append(m)
        if len(flying) == stage.num_stages - stage.stage:
            stage.backward(flying.pop())
    while flying:
        stage.backward(flying.pop())
    return sum(stage.losses)
