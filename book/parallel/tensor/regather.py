"""L2: column-parallel layers that keep only a piece of their gathered input, and gather it again for backward.

An ordinary linear layer keeps its input for its weight's gradient. After an all-gather that is the whole sequence on
every rank, which sequence parallelism is meant to avoid (korthikanti2022, section 4.2.2).
"""
from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from book.parallel.tensor.layers import ColumnParallelLinear
from book.parallel.tensor.operators import Group, all_gather_then_reduce_scatter


class Regather:
    """The piece of an input that several layers share; `whole()` gathers it once for the backward of all of them."""

    def __init__(self, piece: torch.Tensor, dim: int, group: Group) -> None:
        self.piece, self.dim, self.group = piece.detach(), dim, group
        self.num_layers, self.num_left = 0, 0
        self._gathered: torch.Tensor | None = None

    def whole(self) -> torch.Tensor:
        """The whole input, on every rank; it is freed once the last layer has asked for it."""
        if self._gathered is None:
            self._gathered = all_gather_then_reduce_scatter(self.piece, self.dim, self.group)
            self.num_left = self.num_layers
        gathered, self.num_left = self._gathered, self.num_left - 1
        if not self.num_left:
            self._gathered = None
        return gathered


def gather_and_keep_piece(x: torch.Tensor, dim: int, group: Group = None) -> torch.Tensor:
    """`all_gather_then_reduce_scatter` for layers of the class `RegatheringLinear`."""
    gathered = all_gather_then_reduce_scatter(x, dim, group)
    gathered.regather = Regather(x, dim, group)
    return gathered


class RegatheringLinear(ColumnParallelLinear):
    """A `ColumnParallelLinear` whose input comes from `gather_and_keep_piece`."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(B, T, in) -> (B, T, out/N)."""
        x = self.enter(x, group=self.group)
        return LinearOfGathered.apply(x, self.weight, self.bias, x.regather)


class LinearOfGathered(torch.autograd.Function):
    """A linear layer that keeps only a piece of its input for backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None,
                regather: Regather) -> torch.Tensor:
        regather.num_layers += 1
        ctx.regather = regather
        ctx.save_for_backward(regather.piece, weight)
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        _, weight = ctx.saved_tensors
        rows = gradient.flatten(0, -2)
        weight_gradient = rows.T @ ctx.regather.whole().flatten(0, -2)
        return gradient @ weight, weight_gradient, rows.sum(0) if ctx.needs_input_grad[2] else None, None
