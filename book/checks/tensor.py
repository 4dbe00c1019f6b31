"""L3: what ranks hold that share out a linear map, and what an operator between them does forward and backward.

What a rank holds instead of the result is found by least squares: a map that is cut by rows is a sum of the ranks'
parts, so most mistakes are multiples of these.

Shapes: B examples, I inputs, O outputs. Weights are (O, I), as nn.Linear keeps them.
"""
from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np

from book.checks.compare import (
    agree, all_but_rank_0, dense, held, identical, is_own, is_zero, magnitude, multiples, same,
)
from book.checks.verdict import CheckFailed, listed, short

# What to say of a product whose sides don't fit, where nothing is known of the weight.
PRODUCT = ("the weight is cut along the wrong dim, or not at all: nn.Linear keeps it as (outputs, inputs), so a column "
           "of the product is a row of the weight, dim 0, and an input is dim 1. Or x is cut once more: it comes as "
           "the rank needs it")

# What torch says, as a pattern, of tensors that don't fit, and what it means where a map is cut.
MEANINGS = {
    r"cannot be multiplied \(\d+x(\d+) and (\d+)x":
        "what comes in has {0} numbers in a row, what it is multiplied with takes {1}: {product}",
    r"expanded size of the tensor \((\d+)\) must match the existing size \((\d+)\)":
        "the bias has {1} numbers, your outputs {0}: a bias has one number for each output, so it is cut where the "
        "outputs are, and whole where they are whole",
    r"tensor a \((\d+)\) must match the size of tensor b \((\d+)\)":
        "{0} numbers meet {1}: one of two tensors that are added is cut and the other is not, or along another dim: a "
        "bias has one number for each output, so it is cut where the outputs are",
    "invalid for input of size|don't multiply up to":
        "a rank holds a part, and this shape is that of the whole: it has H/R heads, as wide as before. -1 lets torch "
        "count them",
    "same dtype": "all that comes in is float64, and nn.Linear makes float32 unless it is told another dtype",
    "out of bounds": "a number was looked up in a table that is shorter: rank r's block of V/R tokens begins at r V/R, "
                     "and the numbers in it count from there. A target outside it is not looked up there at all: clamp "
                     "its place, and put 0 instead of what you find",
    "NoneType": "something here is None: dist.all_reduce works in place and returns nothing, so use the tensor that "
                "you gave it",
}


@contextmanager
def shapes_in_words(product: str = PRODUCT) -> Iterator[None]:
    """Inside a rank: what torch says of tensors that don't fit comes with what it means where a map is cut.

    `product` is what to say of a product whose sides don't fit.
    """
    try:
        yield
    except (RuntimeError, IndexError, TypeError, AttributeError) as error:
        # The error itself goes on, so that it still points to the line where it happened.
        found = [(re.search(said, str(error)), meaning) for said, meaning in MEANINGS.items()]
        meant = [f"{error}: {meaning.format(*said.groups(), product=product)}" for said, meaning in found if said]
        error.args = tuple(meant) or error.args
        raise


def column_outputs(outputs: Sequence[Any], x_BI: Any, weight_OI: Any, bias_O: Any,
                   name: str = "column_linear") -> float:
    """Rank r must hold the r-th block of the columns of x weight^T + bias, (B, O/R) on each of R ranks.

    `name` is that of the function that made them. Returns the sum of the absolute values of all blocks. Raises
    CheckFailed with the likeliest reason.
    """
    bias = dense(bias_O)
    whole = dense(x_BI) @ dense(weight_OI).T + bias
    size = whole.shape[1] // len(outputs)
    for rank, output in enumerate(outputs):
        if getattr(output, "shape", None) == whole.shape and len(outputs) > 1:
            raise CheckFailed(f"{name}, rank {rank} returns all {whole.shape[1]} outputs: it keeps the {size} that its "
                              "part of the weight gives, and nobody gathers them")
        got = held(rank, f"the output of {name}", output, (len(whole), size))
        same(f"{name}, rank {rank}", got, whole[:, rank * size:][:, :size], whole,
             partial(_why_not_columns, rank, got, whole, bias))
    return magnitude(whole)


def row_outputs(outputs: Sequence[Any], x_BI: Any, weight_OI: Any, bias_O: Any,
                name: str = "row_linear") -> float:
    """Every rank must hold all of x weight^T + bias, of which rank r had the r-th block of x's columns.

    `name` is that of the function that made it. Returns the sum of its absolute values. Raises CheckFailed with
    the likeliest reason.
    """
    num_ranks, (x, weight, bias) = len(outputs), map(dense, (x_BI, weight_OI, bias_O))
    whole = x @ weight.T + bias
    parts = [a @ b.T for a in np.split(x, num_ranks, axis=1) for b in np.split(weight, num_ranks, axis=1)]
    rows = np.stack([part.ravel() for part in [*parts, np.broadcast_to(bias, whole.shape)]])
    got = [held(rank, f"the output of {name}", output, whole.shape) for rank, output in enumerate(outputs)]
    wrong = [rank for rank in range(num_ranks) if not agree(got[rank], whole)]
    if wrong and all_but_rank_0(wrong, num_ranks):
        raise CheckFailed(f"{name}: only rank 0 holds the whole output: every rank must end with it; all_reduce gives "
                          "the sum to all, reduce to one, and the bias too belongs to all")
    if wrong:
        rank, odd = wrong[0], got[wrong[0]]
        factors = multiples(rows, odd)
        same(f"{name}, rank {rank}", odd, whole, whole, lambda: _why_no_sum(odd, x, weight, bias, num_ranks)
             if factors is None else _why_not_rows(rank, factors[:-1].reshape(num_ranks, num_ranks), factors[-1]))
    return magnitude(whole)


def operator(name: str, runs: Sequence[Mapping[str, Any]], forward: str, backward: str) -> float:
    """An operator must do `forward` with the ranks' tensors and `backward` with their gradients: "identity" or "sum".

    `runs` has, for each rank, `x` and `upstream`, the gradient that comes back, as they were before; `x_after` and
    `upstream_after`; `output`, and `gradient`, which x gets. Returns the sum of the absolute values of both results on
    rank 0. Raises CheckFailed with the likeliest reason.
    """
    total = 0.0
    ways = (("forward", "x", "output", forward), ("backward", "upstream", "gradient", backward))
    for way, given, result, wanted in ways:
        before = [dense(run[given]) for run in runs]
        for rank, run in enumerate(runs):
            got = held(rank, f"{name}, {way}: the {result}", run[result], before[rank].shape)
            want = np.sum(before, axis=0) if wanted == "sum" else before[rank]
            same(f"{name}, {way}, rank {rank}", got, want, np.stack(before),
                 partial(_why_not_operator, way, wanted, rank, before, got))
            total += np.abs(got).sum() * (rank == 0)
        for rank, run in enumerate(runs):
            if not identical(run[f"{given}_after"], before[rank]):
                raise CheckFailed(f"{name}, {way}: the result is right, but the tensor that came in has changed on "
                                  f"rank {rank}, and others may still need it: all_reduce works in place, so give it a "
                                  "clone")
    return float(total)


def why_parts(rank: int, parts: np.ndarray, bias: float = 1.0) -> str:
    """What is wrong with a sum in which rank r's part is `parts[r]` times and the bias `bias` times."""
    num_ranks = len(parts)
    if np.allclose(parts, 1) and np.isclose(bias, num_ranks):
        return (f"the bias is in it {num_ranks} times: every rank adds it to its part, and then the parts are added "
                "up; add it once, after the all-reduce")
    if np.allclose(parts, 1):
        much = "not in it" if is_zero(bias) else f"in it {short(bias)} times"
        return f"the parts are added up as they should be, but the bias is {much}: every rank must end with it once"
    if is_own(parts, rank):
        return "this is the rank's own part of a sum, with nothing of the others in it: the all-reduce is missing"
    if np.allclose(parts, 1 / num_ranks):
        return f"this is the mean of the {num_ranks} ranks' parts: parts of one sum are added up, not averaged"
    if np.allclose(parts, num_ranks):
        return f"this is {num_ranks} times the sum: is it all-reduced twice?"
    absent = np.flatnonzero(is_zero(parts))
    if len(absent):
        return f"the part of rank {listed(absent)} is not in it: does every rank's part go into the sum?"
    return f"the ranks' parts are in it {_listed(parts)} times, each should be in it once"


def computed(num_flops: Sequence[float], whole_flops: float, name: str = "column_linear") -> None:
    """Each of R ranks may make up to 1/R of the `whole_flops` that the product in `name` takes in one process."""
    for rank, made in enumerate(num_flops):
        if made > whole_flops / len(num_flops):
            much = "the whole product" if made == whole_flops else f"{short(made / whole_flops)} of the product"
            raise CheckFailed(f"{name}: rank {rank} computes {much}, its share is 1/{len(num_flops)}: cut the weight "
                              "and multiply with the part")


def _why_not_columns(rank: int, got: np.ndarray, whole: np.ndarray, bias: np.ndarray) -> str:
    size, mine = got.shape[1], slice(rank * got.shape[1], (rank + 1) * got.shape[1])
    found = _columns(got, whole)
    if found is None:
        off = got - (whole - bias)[:, mine]
        if _columns(got, whole - bias) is not None:
            return "the bias is missing: a column split cuts it as it cuts the outputs"
        if np.allclose(off, off[:1]):
            return "the product is right, the bias is not: it is cut as the outputs are, into blocks in rank order"
        return "this is no block of columns of x weight^T + bias: which part of the weight does the rank multiply with?"
    if found == list(range(found[0], found[0] + size)) and found[0] % size == 0:
        return (f"this is block {found[0] // size} of the columns, which belongs to rank {found[0] // size}: rank r "
                "holds the r-th")
    if found == list(range(rank, whole.shape[1], whole.shape[1] // size)):
        return (f"these are columns {listed(found)}: neighbours belong together, so cut one contiguous "
                f"block for each rank, here columns {mine.start} to {mine.stop - 1}")
    return f"these are columns {listed(found)}, the rank's are {mine.start} to {mine.stop - 1}"


def _listed(factors: np.ndarray) -> str:
    """Factors in words, without what rounding leaves of a zero."""
    return listed(map(short, np.round(factors, 9) + 0.0))


def _why_not_rows(rank: int, crossed: np.ndarray, bias: float) -> str:
    """What is wrong with a sum in which block r of x times block s of the weight is `crossed[r, s]` times."""
    for piece, block in np.argwhere(~is_zero(crossed)):
        if piece != block:
            return (f"block {piece} of x's columns meets block {block} of the weight's: rank r multiplies what it has "
                    "with the r-th block of the weight's dim 1")
    return why_parts(rank, np.diag(crossed), bias)


def _columns(got: np.ndarray, whole: np.ndarray) -> list[int] | None:
    """Which columns of `whole` those of `got` are; None where one is none of them."""
    same = [[agree(column, other, whole) for other in whole.T] for column in got.T]
    return [row.index(True) for row in same] if all(map(any, same)) else None


def _why_no_sum(got: np.ndarray, x: np.ndarray, weight: np.ndarray, bias: np.ndarray, num_ranks: int) -> str:
    pieces = np.split(x, num_ranks, axis=1)
    strided = [weight[:, rank::num_ranks] for rank in range(num_ranks)]
    if agree(got, sum(a @ b.T for a, b in zip(pieces, strided)) + bias, x @ weight.T):
        return (f"each rank takes inputs of the weight that lie {num_ranks} apart, but what it has of x is a block in "
                "one piece: cut both alike")
    return ("this is no sum of products of x's blocks with the weight's: cut dim 1 of the weight into contiguous "
            "blocks in rank order, multiply, add up over the ranks, then add the bias")


def _why_not_operator(way: str, wanted: str, rank: int, before: Sequence[np.ndarray], got: np.ndarray) -> str:
    what = "tensors" if way == "forward" else "gradients"
    factors = multiples(np.stack([one.ravel() for one in before]), got)
    if factors is None:
        return f"this can't be made from the ranks' {what}: was the result written to where it is read?"
    if wanted == "identity":
        if np.allclose(factors, 1):
            return (f"this is the sum over the ranks: on its way {way} this operator hands on what it is given; the "
                    f"all-reduce is for the way {'back' if way == 'forward' else 'forward'}")
        return f"the ranks' {what} are in it {_listed(factors)} times: hand on the rank's own, as it is"
    if is_own(factors, rank):
        return "this is the rank's own, with nothing of the others in it: here the all-reduce is missing, or lost"
    return why_parts(rank, factors)
