# exercise: 7
# expect: its micro-batches weigh

class Mended(Recorded):
    def receive(self, rank, m):
        shape = (*self.inputs[m].shape, config.width)
        tensor = torch.empty(shape, dtype=config.dtype,
                             device=self.inputs[m].device)
        dist.recv(tensor, rank, group=self.lane(rank, going=False))
        return tensor


def mended_step(stage):
    num_sequences = sum(len(x) for x in stage.inputs)
    for m in range(stage.num_micro_batches):
        stage.scale = len(stage.inputs[m - 1]) / num_sequences
        stage.forward(m)
    for m in range(stage.num_micro_batches):
        stage.backward(m)
    return sum(stage.losses)
