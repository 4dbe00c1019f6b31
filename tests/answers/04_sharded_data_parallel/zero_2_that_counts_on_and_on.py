# exercise: 3
# expect: Does your count start again for each backward?

class Zero2(Zero1):
    """Gradients are sharded too: scattered as backward makes them."""

    def __init__(self, module, make_optimizer):
        super().__init__(module, make_optimizer)
        self.num_ready = {unit: 0 for unit in self.units}
        for unit in self.units:
            for p in unit.parameters:
                p.register_post_accumulate_grad_hook(
                    lambda _, unit=unit: self.gradient_ready(unit))

    def gradient_ready(self, unit):
        self.num_ready[unit] += 1
        if self.num_ready[unit] == len(unit.parameters):
            self.unit_done(unit)

    def unit_done(self, unit):
        """Backward has made all gradients of a unit."""
        unit.reduce_scatter()

    def step(self):
        """Update the shards, gather them."""
        self.optimizer.step()
        self.optimizer.zero_grad()
        for unit in self.units:
            unit.all_gather()
