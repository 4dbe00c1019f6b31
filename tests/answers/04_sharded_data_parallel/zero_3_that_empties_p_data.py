# exercise: 4
# expect: outlive the forward, though no parameter shows them

class FreedUnit(Unit):
    def __init__(self, name, module, parameters):
        super().__init__(name, module, parameters)
        self.length = len(self.flat)
        self.shard.data = self.shard.detach().clone()
        self.free()

    def all_gather(self):
        self.flat = self.shard.new_empty(self.length)
        dist.all_gather_into_tensor(self.flat, self.shard.detach())
        first = 0
        for p, size, shape in zip(self.parameters, self.sizes, self.shapes):
            p.data = self.flat[first:first + size].view(shape)
            first += size

    def free(self):
        self.shapes = getattr(self, "shapes", [p.shape for p in self.parameters])
        self.flat = None
        for p in self.parameters:
            p.data = p.new_empty(0)


class Zero3(Zero2):
    """Parameters are sharded too."""

    unit = FreedUnit

    def __init__(self, module, make_optimizer):
        super().__init__(module, make_optimizer)
        for unit in self.units:
            unit.module.register_forward_pre_hook(
                lambda *_, unit=unit: unit.all_gather())
            unit.module.register_forward_hook(
                lambda *_, unit=unit: unit.free())
            unit.module.register_full_backward_pre_hook(
                lambda *_, unit=unit: unit.all_gather())

    def unit_done(self, unit):
        """Backward has made all gradients of a unit."""
        unit.reduce_scatter()
        unit.free()

    def step(self):
        """Update the shards."""
        self.optimizer.step()
        self.optimizer.zero_grad()
