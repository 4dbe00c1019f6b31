# exercise: 7
# expect: Is the input of each micro-batch still as it came

class Mended(Recorded):
    def receive(self, rank, m):
        if not hasattr(self, "buffers"):
            self.buffers = [torch.empty(*x.shape, config.width, dtype=config.dtype, device=x.device) for x in self.inputs]
        dist.recv(self.buffers[m], rank, group=self.lane(rank, going=False))
        return self.buffers[m].detach()


def mended_step(stage):
    num_sequences = sum(len(x) for x in stage.inputs)
    for m in range(stage.num_micro_batches):
        stage.scale = len(stage.inputs[m]) / num_sequences
        stage.forward(m)
    for m in range(stage.num_micro_batches):
        stage.backward(m)
    return sum(stage.losses)
