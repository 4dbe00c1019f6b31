"""L2: sharded data parallelism as chapter 04 builds it: ZeRO-1, 2 and 3 from reduce-scatter and all-gather.

Each stage adds to the previous one: first the optimizer's state is sharded, then the gradients, then the parameters;
stage 0 is the baseline. Torch's own are ZeroRedundancyOptimizer and fully_shard.
"""
from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import nn

from book.parallel.checked import checked_by
from book.parallel.model import Block

Group: TypeAlias = dist.ProcessGroup | None
MakeOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


def check_shards(name: str, group: Group, num_shards: int | None) -> None:
    """Raise ValueError for a number of shards that is neither 1 nor the number of ranks of the group."""
    num_ranks = dist.get_world_size(group)
    if num_shards is not None and num_shards not in (1, num_ranks):
        raise ValueError(f"{name} can't have {num_shards!r} shards: use {num_ranks}, one for each rank, or 1, the "
                         "whole on every rank")


class Unit:
    """Parameters that are gathered, used and freed together, end to end in one flat buffer of N equal shards.

    `shard` is this rank's shard, which its optimizer updates. The parameters become views of `flat`. All ranks of the
    group get the first rank's values; the last shard is padded with zeros. `num_shards` is the size of the group, or 1:
    then each rank keeps everything. Raises ValueError for parameters of several dtypes or devices, for frozen ones, and
    for any other number of shards.
    """

    @checked_by(check_shards)
    def __init__(self, name: str, module: nn.Module, parameters: Sequence[nn.Parameter], group: Group = None,
                 num_shards: int | None = None) -> None:
        self.name, self.module = name, module
        self.parameters, self.group = list(parameters), group
        check_alike(name, self.parameters)
        self.num_ranks = dist.get_world_size(group)
        self.rank = dist.get_rank(group)
        self.num_shards = num_shards or self.num_ranks
        self.flat = self.pack([p.detach() for p in self.parameters])
        dist.broadcast(self.flat, group=group, group_src=0)
        for p, view in zip(self.parameters, self.views()):
            p.data = view
        self.shard = nn.Parameter(self.mine(self.flat))

    def pack(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """Tensors with the parameters' sizes, end to end, padded with zeros to a multiple of N."""
        flat = torch.cat([tensor.flatten() for tensor in tensors])
        return nn.functional.pad(flat, (0, -len(flat) % self.num_shards))

    def mine(self, flat: torch.Tensor) -> torch.Tensor:
        """This rank's shard of a flat buffer: a view."""
        return flat.chunk(self.num_shards)[self.rank % self.num_shards]

    def views(self) -> list[torch.Tensor]:
        """Views of the flat buffer, one for each parameter."""
        sizes = [p.numel() for p in self.parameters]
        pieces = self.flat[:sum(sizes)].split(sizes)
        return [piece.view(p.shape) for piece, p in zip(pieces, self.parameters)]

    def take_gradients(self) -> torch.Tensor:
        """Move the whole gradients from the parameters into one flat buffer; a missing one counts as zero."""
        flat = self.pack([torch.zeros_like(p) if p.grad is None else p.grad for p in self.parameters])
        for p in self.parameters:
            p.grad = None
        return flat

    def add_mean(self, total: torch.Tensor) -> None:
        """Turn a sum over all ranks into their mean, and add it to the shard's gradient."""
        mean = total / self.num_ranks
        if self.shard.grad is not None:
            mean += self.shard.grad
        self.shard.grad = mean

    def reduce_scatter(self) -> None:
        """Add this rank's shard of the mean gradient to `shard.grad`, and drop the whole gradients."""
        total = torch.empty_like(self.shard)
        dist.reduce_scatter_single(total, self.take_gradients(), group=self.group)
        self.add_mean(total)

    def all_reduce(self) -> None:
        """Add the whole mean gradient to `shard.grad`, for units that are not sharded."""
        total = self.take_gradients()
        dist.all_reduce(total, group=self.group)
        self.add_mean(total)

    def all_gather(self) -> None:
        """Fill the flat buffer with every rank's shard."""
        self.flat.untyped_storage().resize_(self.flat.nbytes)
        dist.all_gather_single(self.flat, self.shard.detach(), group=self.group)

    def free(self) -> None:
        """Free the flat buffer's memory; the parameters are views without memory until the next `all_gather`."""
        self.flat.untyped_storage().resize_(0)

    @property
    def is_whole(self) -> bool:
        """Whether the flat buffer has memory because it is gathered or was never freed."""
        return self.flat.untyped_storage().nbytes() > 0


def check_alike(name: str, parameters: Sequence[nn.Parameter]) -> None:
    """Raise ValueError if parameters can't share a flat buffer or an update."""
    if len({(p.dtype, p.device) for p in parameters}) != 1:
        raise ValueError(f"{name} has parameters of several dtypes or devices, or none: a flat buffer has one")
    if not all(p.requires_grad for p in parameters):
        raise ValueError(f"{name} has frozen parameters: the optimizer sees a flat shard, and would let weight decay "
                         "change them too")


def units_of(module: nn.Module, group: Group = None, num_shards: int | None = None) -> list[Unit]:
    """One unit for each block of a model, in order, and one, "root", for the parameters outside the blocks.

    Parameters that several blocks share are in "root" too: they must stay in memory while any of these blocks runs.
    """
    blocks = {name: part for name, part in module.named_modules() if isinstance(part, Block)}
    users = Counter(p for part in blocks.values() for p in part.parameters())
    root = [p for p in module.parameters() if users[p] != 1]
    found = []
    if root:
        found += [Unit("root", module, root, group, num_shards)]
    for name, part in blocks.items():
        own = [p for p in part.parameters() if users[p] == 1]
        if own:
            label = name.replace("blocks.", "block ").removeprefix("model.")
            found += [Unit(label, part, own, group, num_shards)]
    return found


def check_whole(units: Sequence[Unit], *_: Any) -> None:
    """Raise RuntimeError if parameters have no memory and so can't be saved."""
    if not all(unit.is_whole for unit in units):
        raise RuntimeError("the parameters are in shards: save state_dict() of what shards them, on every rank")


class Replicated:
    """Stage 0: every rank keeps and updates the whole model; gradients are all-reduced one unit at a time.

    Use it as the model; call `step()` after one backward, or after several, whose gradients add up. `make_optimizer`
    gets the flat shards that this rank updates, so the optimizer must be elementwise, as SGD and Adam are. All ranks
    must use the same parts of the model. Buffers are not changed.
    """

    def __init__(self, module: nn.Module, make_optimizer: MakeOptimizer, group: Group = None) -> None:
        self.module, self.units = module, self.make_units(module, group)
        self.optimizer = make_optimizer([unit.shard for unit in self.units])

    def make_units(self, module: nn.Module, group: Group) -> list[Unit]:
        """Units of which each rank has the whole."""
        return units_of(module, group, num_shards=1)

    def __call__(self, *inputs: Any) -> Any:
        """The model's forward."""
        return self.module(*inputs)

    def step(self) -> None:
        """Average the gradients, then update."""
        for unit in self.units:
            unit.all_reduce()
        self.update()

    def update(self) -> None:
        """Run the optimizer's step on what this rank updates."""
        self.optimizer.step()
        self.optimizer.zero_grad()

    def state_dict(self) -> dict[str, Any]:
        """A copy of the whole model's state, on every rank; all ranks of the group must call it."""
        freed = [unit for unit in self.units if not unit.is_whole]
        for unit in freed:
            unit.all_gather()
        state = {name: value.clone() for name, value in self.module.state_dict().items()}
        for unit in freed:
            unit.free()
        return state


class Zero1(Replicated):
    """Stage 1: each rank updates one shard of the model, so its optimizer keeps state for 1/N of the parameters."""

    def make_units(self, module: nn.Module, group: Group) -> list[Unit]:
        """Units of which each rank has a shard."""
        return units_of(module, group)

    def step(self) -> None:
        """Average the gradients, on each rank those of its shard; update the shard; gather all shards."""
        for unit in self.units:
            unit.reduce_scatter()
        self.update()
        for unit in self.units:
            unit.all_gather()


class Zero2(Zero1):
    """Stage 2: a rank also keeps only its shard of the gradients; each unit's are scattered during backward."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.ready = {unit: set() for unit in self.units}
        for unit in self.units:
            for p in unit.parameters:
                p.register_post_accumulate_grad_hook(partial(self.gradient_ready, unit))

    def gradient_ready(self, unit: Unit, parameter: nn.Parameter) -> None:
        """Scatter a unit's gradients once the last of them is ready."""
        self.ready[unit].add(parameter)
        if len(self.ready[unit]) == len(unit.parameters):
            self.unit_done(unit)

    def unit_done(self, unit: Unit) -> None:
        """Backward has left this unit."""
        self.ready[unit].clear()
        unit.reduce_scatter()

    def finish(self) -> None:
        """Scatter the gradients of units where backward has reached only some of the parameters."""
        for unit in self.units:
            if self.ready[unit]:
                self.unit_done(unit)

    def step(self) -> None:
        """Update this rank's shards, then gather them."""
        self.finish()
        self.update()
        for unit in self.units:
            unit.all_gather()


class Zero3(Zero2):
    """Stage 3: a rank also keeps only its shard of the parameters. A unit is whole only while it runs."""

    def __init__(self, module: nn.Module, *arguments: Any, **options: Any) -> None:
        super().__init__(module, *arguments, **options)
        self.in_backward = set()
        for unit in self.units:
            unit.shard.data = unit.shard.detach().clone()  # so far a view of the flat buffer
            unit.free()
            unit.module.register_forward_pre_hook(lambda *_, unit=unit: self.gather(unit))
            unit.module.register_forward_hook(lambda *_, unit=unit: self.forward_done(unit))
            unit.module.register_full_backward_pre_hook(lambda *_, unit=unit: self.backward_begins(unit))
        module.register_state_dict_pre_hook(partial(check_whole, self.units))

    def gather(self, unit: Unit) -> None:
        """Gather a unit, unless it is whole already."""
        if not unit.is_whole:
            unit.all_gather()

    def forward_done(self, unit: Unit) -> None:
        """Forward has left this unit: free it, unless backward was recomputing it and still needs it."""
        if unit not in self.in_backward:
            unit.free()

    def backward_begins(self, unit: Unit) -> None:
        """Backward has reached this unit."""
        self.in_backward.add(unit)
        self.gather(unit)

    def unit_done(self, unit: Unit) -> None:
        """Backward has left this unit."""
        super().unit_done(unit)
        self.in_backward.discard(unit)
        unit.free()

    def step(self) -> None:
        """Update this rank's shards; nothing has to be gathered."""
        self.finish()
        self.update()
