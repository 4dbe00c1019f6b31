# exercise: 7
# expect: is the input of a micro-batch still as it came when its backward runs

class Mended(Recorded):
    buffer = None

    def receive(self, rank, m):
        shape = (*self.inputs[m].shape, config.width)
        if self.buffer is None:
            self.buffer = torch.empty(10_000, dtype=config.dtype, device=self.inputs[m].device)
        tensor = self.buffer[:torch.Size(shape).numel()].view(shape)
        dist.recv(tensor, rank, group=self.lane(rank, going=False))
        return tensor.detach()


def mended_step(stage):
    num_sequences = sum(len(x) for x in stage.inputs)
    for m in range(stage.num_micro_batches):
        stage.scale = len(stage.inputs[m]) / num_sequences
        stage.forward(m)
    for m in range(stage.num_micro_batches):
        stage.backward(m)
    return sum(stage.losses)
