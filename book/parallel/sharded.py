"""L2: sharded data parallelism as chapter 04 builds it: ZeRO-1, 2 and 3 from reduce-scatter and all-gather.

Each stage adds to the one before: the optimizer's state is sharded, then the gradients, then the parameters.
Torch's own are ZeroRedundancyOptimizer and fully_shard.
"""
from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from book.parallel.model import Block

Group = dist.ProcessGroup | None


class Unit:
    """Parameters that are gathered, used and freed together, end to end in one flat buffer of N equal shards.

    `shard` is this rank's: what its optimizer updates. The parameters become views of `flat`. All ranks of the group
    get the first one's values; zeros fill the last shard up. Raises ValueError for parameters of several dtypes.
    """

    def __init__(self, name: str, module: nn.Module, parameters: Sequence[nn.Parameter], group: Group = None) -> None:
        if len({p.dtype for p in parameters}) != 1:
            raise ValueError(f"{name} has parameters of several dtypes, or none: a flat buffer has one")
        self.name, self.module, self.parameters, self.group = name, module, list(parameters), group
        self.num_shards, self.rank = dist.get_world_size(group), dist.get_rank(group)
        self.flat = self.pack([p.detach() for p in self.parameters])
        dist.broadcast(self.flat, dist.get_global_rank(group or dist.group.WORLD, 0), group=group)
        for p, view in zip(self.parameters, self.views()):
            p.data = view
        self.shard = nn.Parameter(self.mine(self.flat))

    def pack(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """Tensors as large as the parameters, end to end, with zeros up to a multiple of N."""
        flat = torch.cat([tensor.flatten() for tensor in tensors])
        return nn.functional.pad(flat, (0, -len(flat) % self.num_shards))

    def mine(self, flat: torch.Tensor) -> torch.Tensor:
        """This rank's shard of a flat buffer: a view."""
        return flat.chunk(self.num_shards)[self.rank]

    def views(self) -> list[torch.Tensor]:
        """The flat buffer as the parameters see it."""
        sizes = [p.numel() for p in self.parameters]
        pieces = self.flat[:sum(sizes)].split(sizes)
        return [piece.view(p.shape) for piece, p in zip(pieces, self.parameters)]

    def reduce_scatter(self) -> None:
        """Add this rank's shard of the mean gradient to `shard.grad`, and drop the whole gradients."""
        gradients = self.pack([torch.zeros_like(p) if p.grad is None else p.grad for p in self.parameters])
        piece = torch.empty_like(self.shard)
        dist.reduce_scatter_tensor(piece, gradients, group=self.group)
        piece /= self.num_shards
        self.shard.grad = piece if self.shard.grad is None else self.shard.grad + piece
        for p in self.parameters:
            p.grad = None

    def all_gather(self) -> None:
        """Fill the flat buffer with every rank's shard."""
        self.flat.untyped_storage().resize_(self.flat.nbytes)
        dist.all_gather_into_tensor(self.flat, self.shard.detach(), group=self.group)

    def free(self) -> None:
        """Give the flat buffer's memory back; the parameters are views of nothing until the next `all_gather`."""
        self.flat.untyped_storage().resize_(0)


def units_of(module: nn.Module, group: Group = None) -> list[Unit]:
    """One unit for each block of a model, in their order, and one, "root", for the parameters outside of them."""
    found, taken = [], set()
    for name, part in module.named_modules():
        if isinstance(part, Block):
            found.append((name.replace("blocks.", "block ").removeprefix("model."), part, list(part.parameters())))
            taken.update(part.parameters())
    rest = [p for p in module.parameters() if p not in taken]
    return [Unit(*unit, group) for unit in ([("root", module, rest)] if rest else []) + found]


class Zero1:
    """A model of which each rank updates one shard: the optimizer keeps state for 1/N of the parameters.

    Use it as the model; call `step()` after backward. `make_optimizer` gets this rank's shards: it has to be one that
    treats each number by itself, as SGD and Adam do.
    """

    def __init__(self, module: nn.Module, make_optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer],
                 group: Group = None) -> None:
        self.module, self.units = module, units_of(module, group)
        self.optimizer = make_optimizer([unit.shard for unit in self.units])

    def __call__(self, *inputs: Any) -> Any:
        """The model's forward."""
        return self.module(*inputs)

    def step(self) -> None:
        """Average the gradients, each rank its shard; update that; bring the shards together."""
        for unit in self.units:
            unit.reduce_scatter()
        self.update()
        for unit in self.units:
            unit.all_gather()

    def update(self) -> None:
        """The optimizer's step, on this rank's shards alone."""
        self.optimizer.step()
        self.optimizer.zero_grad()


class Zero2(Zero1):
    """As Zero1, and of the gradients too a rank keeps its shard: each unit's are scattered as backward makes them."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.ready = {unit: set() for unit in self.units}
        for unit in self.units:
            for p in unit.parameters:
                p.register_post_accumulate_grad_hook(partial(self.gradient_ready, unit))

    def gradient_ready(self, unit: Unit, parameter: nn.Parameter) -> None:
        """Scatter a unit's gradients when the last of them is there."""
        self.ready[unit].add(parameter)
        if len(self.ready[unit]) == len(unit.parameters):
            self.ready[unit].clear()
            self.unit_done(unit)

    def unit_done(self, unit: Unit) -> None:
        """Backward has left this unit."""
        unit.reduce_scatter()

    def step(self) -> None:
        """Update this rank's shards; bring them together."""
        self.update()
        for unit in self.units:
            unit.all_gather()


class Zero3(Zero2):
    """As Zero2, and of the parameters too: a unit is whole only while its forward or its backward runs."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        for unit in self.units:
            unit.shard.data = unit.shard.detach().clone()  # until now a view of the flat buffer
            unit.free()
            unit.module.register_forward_pre_hook(lambda *_, unit=unit: unit.all_gather())
            unit.module.register_forward_hook(lambda *_, unit=unit: unit.free())
            unit.module.register_full_backward_pre_hook(lambda *_, unit=unit: unit.all_gather())

    def unit_done(self, unit: Unit) -> None:
        """Backward has left this unit."""
        unit.reduce_scatter()
        unit.free()

    def step(self) -> None:
        """Update this rank's shards: nothing has to be brought together."""
        self.update()
