# exercise: 4
# expect: pass

class FreedUnit(Unit):
    def __init__(self, name, module, parameters):
        super().__init__(name, module, parameters)
        self.shard = nn.Parameter(self.shard.detach().clone())
        self.length, self.flat = len(self.flat), None
        for p in parameters:
            p.data = p.data.clone()
        self.free()

    def all_gather(self):
        flat = self.shard.new_empty(self.length)
        dist.all_gather_into_tensor(flat, self.shard.detach())
        for p, piece in zip(self.parameters, flat[:sum(self.sizes)].split(self.sizes)):
            p.untyped_storage().resize_(p.nbytes)
            with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(p):
                p.copy_(piece.view_as(p))

    def free(self):
        for p in self.parameters:
            p.untyped_storage().resize_(0)


class Zero3(Zero2):
    unit = FreedUnit

    def __init__(self, module, make_optimizer):
        super().__init__(module, make_optimizer)
        for unit in self.units:
            self.follow(unit)

    def follow(self, unit):
        def gather(*_):
            unit.all_gather()

        def free(*_):
            unit.free()

        unit.module.register_forward_pre_hook(gather)
        unit.module.register_forward_hook(free)
        unit.module.register_full_backward_pre_hook(gather)

    def unit_done(self, unit):
        super().unit_done(unit)
        unit.free()

    def step(self):
        self.optimizer.step()
        self.optimizer.zero_grad()
