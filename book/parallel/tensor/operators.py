"""L2: four operators through which activations enter and leave layers that are split over ranks.

They come in two pairs: the backward of one is the forward of the other, and each is named for what it does forward and
then backward. A group of None means all ranks.
"""
from __future__ import annotations

from typing import Any, TypeAlias

import torch
import torch.distributed as dist

Group: TypeAlias = dist.ProcessGroup | None


class IdentityThenAllReduce(torch.autograd.Function):
    """The autograd function behind `identity_then_all_reduce`."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Group) -> torch.Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return AllReduceThenIdentity.apply(gradient, ctx.group), None


class AllReduceThenIdentity(torch.autograd.Function):
    """The autograd function behind `all_reduce_then_identity`."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Group) -> torch.Tensor:
        ctx.group = group
        total = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return IdentityThenAllReduce.apply(gradient, ctx.group), None


class AllGatherThenReduceScatter(torch.autograd.Function):
    """The autograd function behind `all_gather_then_reduce_scatter`."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, dim: int, group: Group) -> torch.Tensor:
        ctx.dim, ctx.group = dim, group
        x = x.contiguous()
        pieces = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
        dist.all_gather(pieces, x, group=group)
        return torch.cat(pieces, dim)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return ReduceScatterThenAllGather.apply(gradient, ctx.dim, ctx.group), None, None


class ReduceScatterThenAllGather(torch.autograd.Function):
    """The autograd function behind `reduce_scatter_then_all_gather`."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, dim: int, group: Group) -> torch.Tensor:
        ctx.dim, ctx.group = dim, group
        pieces = [piece.contiguous() for piece in x.chunk(dist.get_world_size(group), dim)]
        total = torch.empty_like(pieces[0])
        dist.reduce_scatter(total, pieces, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return AllGatherThenReduceScatter.apply(gradient, ctx.dim, ctx.group), None, None


def identity_then_all_reduce(x: torch.Tensor, group: Group = None) -> torch.Tensor:
    """Pass activations that are the same on all ranks to split layers; backward sums their gradients over the ranks.

    It is f in Megatron-LM's figure 3 (shoeybi2019).
    """
    return IdentityThenAllReduce.apply(x, group)


def all_reduce_then_identity(x: torch.Tensor, group: Group = None) -> torch.Tensor:
    """Sum the outputs of the ranks' split layers; backward passes the gradient on unchanged.

    It is g in Megatron-LM's figure 3 (shoeybi2019).
    """
    return AllReduceThenIdentity.apply(x, group)


def all_gather_then_reduce_scatter(x: torch.Tensor, dim: int, group: Group = None) -> torch.Tensor:
    """Concatenate the ranks' pieces along `dim`; backward sums the gradients and gives every rank its piece.

    All pieces have the same shape. (korthikanti2022)
    """
    return AllGatherThenReduceScatter.apply(x, dim, group)


def reduce_scatter_then_all_gather(x: torch.Tensor, dim: int, group: Group = None) -> torch.Tensor:
    """Sum over the ranks and keep this rank's piece along `dim`; backward concatenates the gradient's pieces.

    Raises ValueError if the length of `dim` is not a multiple of the ranks. (korthikanti2022)
    """
    num_ranks = dist.get_world_size(group)
    if x.shape[dim] % num_ranks:
        raise ValueError(f"dim {dim} has a length of {x.shape[dim]}, which {num_ranks} ranks can't share equally: make "
                         f"it a multiple of {num_ranks}, or leave sequence parallelism out")
    return ReduceScatterThenAllGather.apply(x, dim, group)


def already_entered(x: torch.Tensor, group: Group = None) -> torch.Tensor:
    """Return the input unchanged: an operator in front of several layers has been applied for all of them already."""
    return x
