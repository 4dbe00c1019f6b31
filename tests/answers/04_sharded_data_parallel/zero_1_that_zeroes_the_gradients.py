# exercise: 2
# expect: Zeros in its place keep the memory

class Unit:
    """Parameters that are gathered, scattered and freed together."""

    def __init__(self, name, module, parameters):
        self.name, self.module, self.parameters = name, module, parameters
        self.num_shards, self.rank = dist.get_world_size(), dist.get_rank()
        self.sizes = [p.numel() for p in parameters]
        self.flat = self.pack([p.detach() for p in parameters])
        dist.broadcast(self.flat, src=0)
        pieces = self.flat[:sum(self.sizes)].split(self.sizes)
        for p, piece in zip(parameters, pieces):
            p.data = piece.view(p.shape)
        self.shard = nn.Parameter(self.flat.chunk(self.num_shards)[self.rank])

    def pack(self, tensors):
        flat = torch.cat([tensor.flatten() for tensor in tensors])
        return pad(flat, (0, -len(flat) % self.num_shards))

    def reduce_scatter(self):
        """Add this rank's piece of the mean gradient to shard.grad."""
        whole = self.pack([p.grad for p in self.parameters])
        piece = torch.empty_like(self.shard)
        dist.reduce_scatter_tensor(piece, whole)
        piece /= self.num_shards
        if self.shard.grad is not None:
            piece += self.shard.grad
        self.shard.grad = piece
        for p in self.parameters:
            p.grad.zero_()

    def all_gather(self):
        """Bring every rank's shard into the parameters."""
        dist.all_gather_into_tensor(self.flat, self.shard.detach())


class Zero1:
    """The optimizer's state is sharded; used in the place of the model."""

    unit = Unit

    def __init__(self, module, make_optimizer):
        self.module = module
        self.units = [self.unit(*part) for part in parts_of(module)]
        self.optimizer = make_optimizer([unit.shard for unit in self.units])

    def __call__(self, tokens):
        return self.module(tokens)

    def step(self):
        """Scatter the gradients, update the shards, gather them."""
        for unit in self.units:
            unit.reduce_scatter()
        self.optimizer.step()
        self.optimizer.zero_grad()
        for unit in self.units:
            unit.all_gather()
