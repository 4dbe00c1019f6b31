# exercise: 7
# expect: pass

class Mended(Recorded):
    def receive(self, rank, m):
        num_sequences, num_tokens = self.inputs[m].shape
        if not hasattr(self, "buffer"):
            largest = max(len(x) for x in self.inputs)
            self.buffer = torch.empty(largest, num_tokens, config.width, dtype=config.dtype, device=self.inputs[m].device)
        dist.recv(self.buffer[:num_sequences], rank, group=self.lane(rank, going=False))
        return self.buffer[:num_sequences].clone()


def mended_step(stage):
    total = sum(map(len, stage.inputs))
    depth, done = stage.num_stages - stage.stage, 0
    for m, x in enumerate(stage.inputs):
        stage.scale = len(x) / total
        stage.forward(m)
        if m + 1 >= depth:
            stage.backward(done)
            done += 1
    for m in range(done, stage.num_micro_batches):
        stage.backward(m)
    return sum(stage.losses)
