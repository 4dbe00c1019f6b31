# exercise: 4
# expect: in the backward of root

class FreedUnit(Unit):
    """A unit whose parameters are whole only between gather and free."""

    def __init__(self, name, module, parameters):
        super().__init__(name, module, parameters)
        self.shard.data = self.shard.detach().clone()
        self.free()

    def all_gather(self):
        """Take memory for the whole parameters, and fill it."""
        self.flat.untyped_storage().resize_(self.flat.nbytes)
        super().all_gather()

    def free(self):
        """Give that memory back."""
        self.flat.untyped_storage().resize_(0)


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

    def unit_done(self, unit):
        """Backward has made all gradients of a unit."""
        unit.reduce_scatter()
        unit.free()

    def step(self):
        """Update the shards."""
        self.optimizer.step()
        self.optimizer.zero_grad()
