# exercise: 2
# expect: pass

class Unit:
    def __init__(self, name, module, parameters):
        self.name, self.module, self.parameters = name, module, parameters
        self.num_shards, self.rank = dist.get_world_size(), dist.get_rank()
        self.flat = torch.cat([p.detach().flatten() for p in parameters])
        dist.broadcast(self.flat, src=0)
        self.fill()
        self.shard = nn.Parameter(self.flat.tensor_split(self.num_shards)[self.rank])

    def fill(self):
        first = 0
        for p in self.parameters:
            p.data.copy_(self.flat[first:first + p.numel()].view_as(p))
            first += p.numel()

    def reduce_scatter(self):
        whole = torch.cat([p.grad.flatten() for p in self.parameters]) / self.num_shards
        for rank, piece in enumerate(whole.tensor_split(self.num_shards)):
            dist.reduce(piece, dst=rank)
            if rank == self.rank:
                self.shard.grad = piece.clone()
        for p in self.parameters:
            p.grad = None

    def all_gather(self):
        for rank, piece in enumerate(self.flat.tensor_split(self.num_shards)):
            dist.broadcast(piece, src=rank)
        self.fill()


class Zero1:
    unit = Unit

    def __init__(self, module, make_optimizer):
        self.module = module
        self.units = [self.unit(*part) for part in parts_of(module)]
        self.optimizer = make_optimizer([unit.shard for unit in self.units])

    def __call__(self, tokens):
        return self.module(tokens)

    def step(self):
        for unit in self.units:
            unit.reduce_scatter()
        self.optimizer.step()
        for unit in self.units:
            unit.shard.grad = None
            unit.all_gather()
