"""L0: how much of its buffer a rank sends in a collective that is as frugal as can be, by the number of ranks.

nccl-tests' factors from algorithm to bus bandwidth: what the busiest rank of a ring, or of a chain from the root, sends
of n bytes, the largest buffer that an operation has on a rank.
"""
from __future__ import annotations

from collections.abc import Callable, Mapping

BUS_FACTORS: Mapping[str, Callable[[int], float]] = {
    "all_reduce": lambda p: 2 * (p - 1) / p,
    "reduce_scatter": lambda p: (p - 1) / p,
    "all_gather": lambda p: (p - 1) / p,
    "broadcast": lambda p: 1.0,
    "reduce": lambda p: 1.0,
    "scatter": lambda p: (p - 1) / p,
    "gather": lambda p: (p - 1) / p,
    "all_to_all": lambda p: (p - 1) / p,
}
