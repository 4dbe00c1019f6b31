# exercise: 3
# expect: waits in send to rank

def send(self, tensor, rank):
    dist.send(tensor.detach(), rank, group=self.lane(rank, going=True))


Neighbours.send = send


def one_f_one_b(stage):
    stage.scale = 1 / stage.num_micro_batches
    num_warm_up = min(stage.num_stages - 1 - stage.stage,
                      stage.num_micro_batches)
    for m in range(num_warm_up):
        stage.forward(m)
    for m in range(stage.num_micro_batches):
        if num_warm_up + m < stage.num_micro_batches:
            stage.forward(num_warm_up + m)
        stage.backward(m)
    return sum(stage.losses)
