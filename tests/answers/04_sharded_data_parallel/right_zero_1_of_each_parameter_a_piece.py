# exercise: 2
# expect: pass

class Unit:
    def __init__(self, name, module, parameters):
        self.name, self.module, self.parameters = name, module, parameters
        self.num_shards, self.rank = dist.get_world_size(), dist.get_rank()
        for p in parameters:
            dist.broadcast(p.detach(), src=0)
        self.shard = nn.Parameter(torch.cat([self.cut(p)[self.rank] for p in parameters]))

    def cut(self, tensor):
        flat = tensor.detach().flatten()
        return pad(flat, (0, -len(flat) % self.num_shards)).chunk(self.num_shards)

    def reduce_scatter(self):
        pieces = [torch.cat(own) for own in zip(*(self.cut(p.grad) for p in self.parameters))]
        self.shard.grad = torch.empty_like(self.shard)
        dist.reduce_scatter(self.shard.grad, pieces)
        self.shard.grad /= self.num_shards
        for p in self.parameters:
            p.grad = None

    def all_gather(self):
        shards = [torch.empty_like(self.shard) for _ in range(self.num_shards)]
        dist.all_gather(shards, self.shard.detach())
        sizes = [-(-p.numel() // self.num_shards) for p in self.parameters]
        for p, pieces in zip(self.parameters, zip(*(shard.split(sizes) for shard in shards))):
            p.data.copy_(torch.cat(pieces)[:p.numel()].view_as(p))


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
