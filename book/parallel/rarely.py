"""L2: training that talks rarely, as chapter 15 builds it: ranks train apart, and agree on weights every so many steps.

Plain averaging is local SGD (stich2019). With an outer optimizer that takes what the ranks have travelled as a gradient
it is DiLoCo (douillard2023), and part after part it is streaming DiLoCo (douillard2025).
"""
from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn

from book.parallel.checked import checked_by
from book.parallel.data import broadcast_state


def _check(every: int, lr: float, momentum: float) -> None:
    if isinstance(every, bool) or not isinstance(every, int) or every < 1:
        raise ValueError(f"every must be a whole number of steps, at least 1, not {every!r}")
    if not lr > 0:
        raise ValueError(f"lr must be above 0, not {lr!r}")
    if not 0 <= momentum < 1:
        raise ValueError(f"momentum must be at least 0 and below 1, not {momentum!r}")


class Rarely:
    """Agree on a module's weights every so many steps; call `after_step()` after each step of the inner optimizer.

    All ranks of the world begin with rank 0's parameters and buffers, and those of `group` agree with one another. With
    `lr` 1 and no momentum the weights are averaged; buffers are not. `agreed` holds the weights that all have agreed on
    last, in the dtypes of the parameters: in 16 bits small differences are lost. Raises ValueError
    for less than one step, an `lr` that is not above 0 and a `momentum` outside [0, 1).
    """

    @checked_by(_check)
    def __init__(self, module: nn.Module, every: int, lr: float = 1.0, momentum: float = 0.0,
                 group: dist.ProcessGroup | None = None) -> None:
        broadcast_state(module)
        self.group = group
        self.parameters, self.every, self.num_steps = [*module.parameters()], every, 0
        self.agreed = [p.detach().clone() for p in self.parameters]
        self.outer = torch.optim.SGD(self.agreed, lr=lr, momentum=momentum, nesterov=momentum > 0)

    def after_step(self) -> bool:
        """Count a step, and agree if it is time to; whether it was."""
        self.num_steps += 1
        if self.num_steps % self.every:
            return False
        self.agree()
        return True

    @torch.no_grad()
    def agree(self) -> None:
        """Take the mean of what the ranks have travelled as a gradient, step on it, and go on from there."""
        flat = torch.cat([(was - p).flatten() for was, p in zip(self.agreed, self.parameters)])
        dist.all_reduce(flat, group=self.group)
        flat /= dist.get_world_size(self.group)
        for was, piece in zip(self.agreed, flat.split([p.numel() for p in self.parameters])):
            was.grad = piece.view_as(was)
        self.outer.step()
        for was, p in zip(self.agreed, self.parameters):
            p.copy_(was)


class Streaming:
    """Agree on a module's weights part after part, and on each part every so many steps, as `Rarely` does on all.

    Parts are runs of parameters with about as many numbers. Part k of K agrees k/K of `every` after a multiple of it,
    rounded down, so about a K-th of the bytes goes at once, and in all as many. Ranks wait for each part: the paper's
    ranks train on while it is on its way, and send it in 4 bits. Raises ValueError for more parts than can be cut.
    """

    def __init__(self, module: nn.Module, every: int, num_parts: int, lr: float = 1.0, momentum: float = 0.0,
                 group: dist.ProcessGroup | None = None) -> None:
        broadcast_state(module)
        self.parts = [Rarely(nn.ParameterList(part), every, lr, momentum, group)
                      for part in _cut([*module.parameters()], num_parts)]
        for number, part in enumerate(self.parts, 1):
            part.num_steps = -(number * every // num_parts)

    @property
    def agreed(self) -> list[torch.Tensor]:
        """The weights of each part that all have agreed on last."""
        return [was for part in self.parts for was in part.agreed]

    def after_step(self) -> bool:
        """Count a step, and agree on what it is time for; whether there was such a part."""
        return any([part.after_step() for part in self.parts])


def _cut(parameters: Sequence[nn.Parameter], num_parts: int) -> list[list[nn.Parameter]]:
    """Runs of parameters: each belongs to the part in which its first number lies, if all are cut evenly."""
    total = sum(p.numel() for p in parameters)
    before = [sum(p.numel() for p in parameters[:place]) for place in range(len(parameters))]
    parts = [[p for p, first in zip(parameters, before) if first * num_parts // total == part]
             for part in range(num_parts)]
    if not parts or not all(parts):
        raise ValueError(f"these {len(parameters)} parameters can't be cut into {num_parts} parts: use fewer, at least "
                         "one")
    return parts
