"""Matrix products cut over ranks as learners write them, right and wrong, for tests that record them on real ranks."""
from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from book.launch import launch
from book.shards import trace_mlp, trace_product
from book.trace import Trace
from tests.by_value import sent_by_value
from tests.once import once

sent_by_value(__name__)


def own(whole: Tensor, dim: int) -> Tensor:
    """This rank's part of a tensor that is cut along `dim`."""
    return whole.chunk(dist.get_world_size(), dim)[dist.get_rank()]


def summed(y: Tensor) -> Tensor:
    """The sum of all ranks' y, in its place."""
    dist.all_reduce(y)
    return y


class IdentityThenSum(torch.autograd.Function):
    """x itself; backward, the sum of all ranks' gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return summed(gradient.clone())


class SumThenIdentity(torch.autograd.Function):
    """The sum of all ranks' x; backward, the gradient itself."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return summed(x.clone())

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


def gathered(x: Tensor) -> Tensor:
    """All ranks' rows of x."""
    out = x.new_empty(len(x) * dist.get_world_size(), x.shape[1])
    dist.all_gather_into_tensor(out, x.contiguous())
    return out


def scattered(x: Tensor) -> Tensor:
    """This rank's rows of the sum of all ranks' x."""
    out = torch.empty_like(own(x, 0))
    dist.reduce_scatter_tensor(out, x)
    return out


class GatherThenScatter(torch.autograd.Function):
    """All ranks' rows; backward, this rank's rows of the summed gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return gathered(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return scattered(gradient)


class ScatterThenGather(torch.autograd.Function):
    """This rank's rows of the sum; backward, all ranks' rows of the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return scattered(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gathered(gradient)


def by_columns(x: Tensor, a: Tensor) -> Tensor:
    """Each rank has columns of A and gets those of Y."""
    return x @ own(a, 1)


def by_columns_gathered(x: Tensor, a: Tensor) -> Tensor:
    """And all ranks get all columns."""
    y = by_columns(x, a)
    columns = [torch.empty_like(y) for _ in range(dist.get_world_size())]
    dist.all_gather(columns, y)
    return torch.cat(columns, 1)


def partial_sum(x: Tensor, a: Tensor) -> Tensor:
    """Each rank has rows of A; nobody adds up what comes of it."""
    return own(x, 1) @ own(a, 0)


def by_rows(x: Tensor, a: Tensor) -> Tensor:
    """Each rank has rows of A, and one all-reduce adds up what comes of it."""
    return summed(partial_sum(x, a))


def by_rows_twice(x: Tensor, a: Tensor) -> Tensor:
    """One all-reduce too many."""
    return summed(by_rows(x, a))


def by_columns_summed(x: Tensor, a: Tensor) -> Tensor:
    """An all-reduce of what should have been gathered."""
    return summed(by_columns(x, a))


def bias_on_every_rank(x: Tensor, a: Tensor, bias: Tensor) -> Tensor:
    """The bias is added before the sum."""
    return summed(partial_sum(x, a) + bias)


def bias_after_the_sum(x: Tensor, a: Tensor, bias: Tensor) -> Tensor:
    """The bias is added once."""
    return by_rows(x, a) + bias


def mlp(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Columns, GELU, rows, and the two conjugate operators."""
    h = F.gelu(IdentityThenSum.apply(x) @ own(a, 1))
    return SumThenIdentity.apply(h @ own(b, 0))


def mlp_without_backward_sum(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """The operator before the first product is missing."""
    return SumThenIdentity.apply(F.gelu(x @ own(a, 1)) @ own(b, 0))


def mlp_rows_first(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """A is cut by rows, and GELU is applied to partial sums."""
    return summed(F.gelu(partial_sum(x, a)) @ b)


def mlp_sequence_parallel(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """All-gather before, reduce-scatter after."""
    h = F.gelu(GatherThenScatter.apply(own(x, 0)) @ own(a, 1))
    return ScatterThenGather.apply(h @ own(b, 0))


RUNS: dict[str, tuple[Callable, Callable]] = {
    "by columns": (trace_product, by_columns), "gathered": (trace_product, by_columns_gathered),
    "by rows": (trace_product, by_rows), "MLP": (trace_mlp, mlp),
    "MLP, backward": (partial(trace_mlp, backward=True), mlp),
    "sequence parallel": (partial(trace_mlp, backward=True), mlp_sequence_parallel),
    "partial": (trace_product, partial_sum), "twice": (trace_product, by_rows_twice),
    "columns summed": (trace_product, by_columns_summed),
    "bias": (partial(trace_product, bias=True), bias_on_every_rank),
    "bias once": (partial(trace_product, bias=True), bias_after_the_sum),
    "rows first": (trace_mlp, mlp_rows_first),
    "no sum backward": (partial(trace_mlp, backward=True), mlp_without_backward_sum)}


@cache
def recorded(name: str, num_ranks: int = 2) -> Trace:
    """The trace of one of `RUNS`, launched once for all tests of a run."""
    trace, fn = RUNS[name]
    return once(f"shards-{name}-{num_ranks}", lambda: launch(trace, num_ranks, fn, record=True)).trace
