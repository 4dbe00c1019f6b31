"""L2: a matrix product split over all ranks, in the two ways that chapter 05 opens with.

Every rank gets whole matrices and uses its blocks of them. No gradients pass between ranks here; that is what the
operators are for.
"""
from __future__ import annotations

import torch
import torch.distributed as dist


def mine(matrix: torch.Tensor, dim: int) -> torch.Tensor:
    """This rank's block of a matrix that every rank has, cut along `dim` in the same places as `shard` does."""
    return matrix.tensor_split(dist.get_world_size(), dim)[dist.get_rank()]


def by_columns(x: torch.Tensor, a: torch.Tensor) -> torch.Tensor:
    """This rank's columns of the product of x and a; nothing is sent."""
    return x @ mine(a, dim=1)


def by_rows(x: torch.Tensor, a: torch.Tensor) -> torch.Tensor:
    """The whole product of x and a on every rank, summed from the ranks' products with their rows of a."""
    y = mine(x, dim=1) @ mine(a, dim=0)
    dist.all_reduce(y)
    return y
