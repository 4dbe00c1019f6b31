# exercise: 4
# expect: were: cut the blocks first

class Trainer:
    """This rank's part of a GPT on a (pp, dp, tp) mesh, and its training."""

    def __init__(self, gpt, shape, num_micro_batches, make_optimizer):
        self.shape, self.num_micro_batches = shape, num_micro_batches
        self.groups = make_groups(shape)
        rank = dist.get_rank()
        stage, self.replica, _ = place_of(rank, shape)
        broadcast_state(gpt)
        self.part = GPTStage(gpt, stage, shape[0])
        for block in gpt.blocks:
            cut_block(block, self.groups["tp"])
        ranks = next(own for own in groups_of("pp", shape) if rank in own)
        self.pipeline = Pipeline(self.part, ranks, num_micro_batches,
                                 loss_scale=1 / num_micro_batches)
        self.optimizer = make_optimizer(self.part.parameters())

    def gradients(self, inputs, targets):
        """The batch's gradients; the share's loss on the last stage."""
        num_replicas = self.shape[1]
        loss = self.pipeline.run(
            *(batch.chunk(num_replicas)[self.replica]
              .chunk(self.num_micro_batches) for batch in (inputs, targets)))
        found = [p.grad for p in self.part.parameters()]
        flat = torch.cat([gradient.flatten() for gradient in found])
        dist.all_reduce(flat, group=self.groups["dp"])
        flat /= num_replicas
        pieces = flat.split([gradient.numel() for gradient in found])
        for gradient, piece in zip(found, pieces):
            gradient.copy_(piece.view_as(gradient))
        return loss

    def step(self, inputs, targets):
        """One step of training; returns what `gradients` does."""
        self.optimizer.zero_grad()
        loss = self.gradients(inputs, targets)
        self.optimizer.step()
        return loss
