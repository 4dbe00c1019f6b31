"""L3: whether every rank holds the mean of all ranks' gradients, and if not, what it holds instead.

Gradients come as one dict per rank, parameter name -> tensor or array, None where there is no gradient. What
a rank holds instead of the mean is found by least squares: every linear mistake is a set of multiples of the ranks'
gradients.
"""
from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import numpy as np

from book.checks.compare import (
    SIX_DIGITS, TOLERANCE, Gradients, agree, all_but_rank_0, differing, flat, is_zero, magnitude, multiples, times,
    whole,
)
from book.checks.verdict import CheckFailed, finite, listed, short
from book.trace import Trace


def averaged(before: Sequence[Gradients], after: Sequence[Gradients], frozen: Collection[str] = (),
             hints: Mapping[float, str] = {}, tolerance: float = TOLERANCE) -> float:
    """Every rank must hold the mean over ranks of the gradients in `before`; a None there counts as zeros.

    `frozen` names the parameters that must stay without a gradient. `hints` maps a factor to what to say when the
    gradients are that many times the mean. `tolerance` is a share of a parameter's largest gradient. Returns the sum of
    the mean's absolute values, which no rounding on the way changes. Raises CheckFailed with the likeliest reason.
    """
    if len(before) != len(after):
        raise CheckFailed(f"there are {len(before)} ranks, but {len(after)} results")
    for rank, name in ((rank, name) for rank, own in enumerate(after) for name in frozen if own[name] is not None):
        raise CheckFailed(f"rank {rank} now has a gradient for {name}, which is frozen: an optimizer with weight decay "
                          "would change it, so leave parameters alone that don't require a gradient")
    own = {name: _rows(before, name) for name in before[0]}
    own = {name: rows for name, rows in own.items() if rows is not None}
    if not own:
        raise ValueError("no rank has a gradient in `before`: there is nothing to average")
    for rank, name in ((rank, name) for rank in range(len(after)) for name in own if after[rank][name] is not None):
        finite(rank, f"the gradient of {name}", flat(after[rank][name]))
    faults = [(rank, name) for name, rows in own.items() for rank in range(len(before))
              if not agree(after[rank][name], rows.mean(axis=0), rows, tolerance)]
    if faults:
        raise CheckFailed(_why_not_averaged(own, after, faults, hints, tolerance))
    return sum(magnitude(rows.mean(axis=0)) for rows in own.values())


def averaged_in_bits(before: Sequence[Gradients], after: Sequence[Gradients], num_bits: int) -> float:
    """Every rank must hold the mean, or the mean times the number of ranks, as a sum of numbers of `num_bits` bits.

    That is their significand, the leading one included: 8 for bfloat16, 11 for float16. Rounding errors may be up to
    one in 2^(num_bits - 3) of a parameter's largest gradient, but must cancel to half a percent over all of them.
    Returns what `averaged` does.
    """
    total = averaged(before, after, tolerance=2.0 ** (3 - num_bits))
    mean = np.mean([whole(gradients) for gradients in before], axis=0)
    for rank, got in enumerate(whole(gradients) for gradients in after):
        if abs(times(got, mean) - 1) > 0.005:
            raise CheckFailed(f"rank {rank}: the gradients are {times(got, mean):.3f} times the mean, which is more "
                              "than rounding does: by what do you divide?")
        bits = next(bits for bits in (num_bits, 11, 24) if _fits(got, bits) or _fits(got * len(before), bits))
        if bits != num_bits:
            raise CheckFailed(f"rank {rank}: the gradients have been numbers of {bits} significant bits, not of "
                              f"{num_bits}: of which dtype is the tensor that you send?")
    return total


def weights_kept(before: Sequence[Gradients], after: Sequence[Gradients]) -> None:
    """Averaging gradients must leave every rank's weights as they were."""
    for rank, (own, now) in enumerate(zip(before, after)):
        for name in differing(own, now):
            raise CheckFailed(f"rank {rank}'s {name} has changed: average gradients (p.grad), not parameters; it is "
                              "the optimizer that changes those, afterwards")


def accumulated(single: Sequence[Sequence[Gradients]], after: Sequence[Gradients], trace: Trace) -> float:
    """Every rank must hold the mean over ranks and micro-batches, brought about by one all-reduce.

    `single[rank][m]` are the gradients of a rank's micro-batch m by itself. Returns the sum of the absolute values of
    what rank 0 holds. Raises CheckFailed with the likeliest reason.
    """
    num_ranks, num_micro_batches = len(single), len(single[0])
    rows = np.stack([finite(rank, "a micro-batch's gradients", whole(gradients))
                     for rank, own in enumerate(single) for gradients in own])
    for rank, gradients in enumerate(after):
        finite(rank, "its gradients", whole(gradients))
        if not agree(whole(gradients), rows.mean(axis=0), rows):
            factors = multiples(rows, whole(gradients))
            weights = None if factors is None else factors.reshape(num_ranks, num_micro_batches)
            raise CheckFailed(f"rank {rank}: {_why_not_accumulated(rank, weights)}")
    issued = len([event for event in trace.of_rank(0) if event.op == "all_reduce"])
    if issued > 1:
        raise CheckFailed(f"the gradients are right, but took {issued} all-reduces: those of the other micro-batches "
                          "need not be sent, and no_sync must be around their forward as well as their backward")
    return magnitude(whole(after[0]))


def _fits(values: np.ndarray, num_bits: int) -> bool:
    """Whether all numbers have at most `num_bits` significant bits, to one part in a million."""
    significand, exponent = np.frexp(values)
    rounded = np.ldexp(np.round(np.ldexp(significand, num_bits)), exponent - num_bits)
    return bool(np.allclose(values, rounded, rtol=1e-6, atol=0))


def _rows(gradients: Sequence[Gradients], name: str) -> np.ndarray | None:
    """One parameter's gradients, shape (R, n), with zeros for None; None where no rank has one.

    Raises CheckFailed for nan and inf.
    """
    given = [gradient for gradient in (rank[name] for rank in gradients) if gradient is not None]
    if not given:
        return None
    zeros = np.zeros_like(flat(given[0]))
    return np.stack([zeros if own[name] is None else finite(rank, f"its own gradient of {name}", flat(own[name]))
                     for rank, own in enumerate(gradients)])


def _why_not_averaged(own: Mapping[str, np.ndarray], after: Sequence[Gradients], faults: Sequence[tuple[int, str]],
                      hints: Mapping[float, str], tolerance: float) -> str:
    rank, name = faults[0]
    if all(after[rank][name] is None for rank, name in faults):
        return (f"rank {rank} has no gradient for {name}, but other ranks have one: a rank that did not use a "
                "parameter takes part with zeros, and gets the mean like the others")
    faults = [(rank, name) for rank, name in faults if after[rank][name] is not None]
    kept = [name for name, rows in own.items() if all(
        agree(g[name], row, rows) or (g[name] is None and not row.any()) for g, row in zip(after, rows))]
    if kept and set(kept) <= {name for _, name in faults}:
        return _why_kept(kept, len(own))
    several = any(rows.any(axis=1).sum() > 1 for rows in own.values())
    for source in range(len(after)):
        if several and all(agree(gradients[name], own[name][source], own[name]) for gradients in after for name in own):
            return (f"every rank holds rank {source}'s gradients: a broadcast hands out one rank's, all_reduce adds up "
                    "those of all")
    if all_but_rank_0({rank for rank, _ in faults}, len(after)):
        return "only rank 0 holds the mean: reduce gives the result to one rank, all_reduce to every rank"
    rank = faults[0][0]
    name = max((n for r, n in faults if r == rank), key=lambda n: own[n].shape[1])  # the one that tells most
    got, mean = flat(after[rank][name]), own[name].mean(axis=0)
    factor = times(got, mean) if got.shape == mean.shape else 0.0
    num_users = own[name].any(axis=1).sum()
    if agree(got, factor * mean, own[name], tolerance):
        if num_users < len(after) and np.isclose(factor, len(after) / num_users):
            return (f"rank {rank}, {name}: this is the mean over the {num_users} ranks that have a gradient; it must "
                    f"be over all {len(after)}, with zeros for the others")
        return f"rank {rank}, {name}: {_why_times(factor, len(after), hints, max(tolerance, 1e-6))}"
    factors = multiples(own[name], got)
    if factors is None:
        return f"rank {rank}, {name}: {_why_no_multiples(name, own, got)}"
    return f"rank {rank}, {name}: {_why_factors(rank, factors)}"


def _why_kept(kept: Sequence[str], num_names: int) -> str:
    if len(kept) == num_names:
        return ("every rank still has its own gradients: all-reduce each, wait for it, and write the result where the "
                "gradient is (p.grad /= N does, g = g / N makes a new tensor)")
    return (f"{kept[0]} is still each rank's own, on every rank, and other gradients are averaged: was this one sent, "
            "waited for and copied back?")


def _why_not_accumulated(rank: int, weights: np.ndarray | None) -> str:
    """What is wrong with the weights, shape (ranks, micro-batches), that the micro-batches' gradients have."""
    if weights is None:
        return "this is no sum of the micro-batches' gradients"
    num_ranks, num_micro_batches = weights.shape
    share, others = 1 / weights.size, np.delete(weights, rank, axis=0)
    if np.allclose(weights, share * num_micro_batches):
        return ("the micro-batches' gradients add up, and each loss is a mean: divide by the number of micro-batches")
    if is_zero(others).all():
        return "nothing of the other ranks is in the gradients: one backward must be synchronised, the last one"
    absent = np.flatnonzero(is_zero(others).all(axis=0))
    if len(absent):
        return (f"the other ranks' micro-batches {listed(absent)} are not in it: an all-reduce sends what "
                "has been accumulated by then, so the synchronised backward must be the last one, with its forward "
                "outside no_sync too: DDP decides there")
    if np.allclose(weights, weights[0, 0]):
        return (f"every micro-batch weighs {short(weights[0, 0] / share)} times what it should: DDP divides by the "
                "ranks already, you by the micro-batches")
    return (f"a micro-batch weighs between {short(weights.min())} and {short(weights.max())}, each should weigh "
            f"{short(share)}")


def _why_no_multiples(name: str, own: Mapping[str, np.ndarray], got: np.ndarray) -> str:
    rows = own[name]
    if agree(got, rows.mean(axis=0), rows, tolerance=SIX_DIGITS):
        return "the mean is right to six digits only: has it been float32 on the way?"
    for other, theirs in own.items():
        if other != name and theirs.shape == rows.shape and multiples(np.concatenate([rows, theirs]), got) is not None:
            why = ("the ranks made their all-reduces in different orders" if rows.any(axis=1).all() else
                   "a rank that has no gradient for it left its all-reduce out, or made it at another place")
            return f"this is mixed with gradients of {other}: {why}, and one rank's first meets the first of others"
    return ("what is there can't be made from the ranks' gradients of this parameter: is each result copied back to "
            "the place it came from, and has everything arrived by then?")


def _why_factors(rank: int, factors: np.ndarray) -> str:
    """What multiples of the ranks' gradients mean that are not all the same; NaN for a rank without a gradient."""
    given, share = ~np.isnan(factors), 1 / len(factors)
    own = np.arange(len(factors)) == rank
    absent = given & is_zero(factors)
    if absent[given & ~own].all():
        return (f"this is {short(factors[rank])} times the rank's own gradient, with nothing of the other ranks in it: "
                "was the all-reduce waited for before its result was used?")
    if np.allclose((factors - own)[given], share):
        return "the mean is added to the rank's own gradient: it must replace it"
    if absent.any():
        return f"nothing of rank {listed(np.flatnonzero(absent))} is in it"
    return f"the ranks' gradients have the weights {listed(map(short, factors[given]))}; each must have {short(share)}"


def _why_times(times: float, num_ranks: int, hints: Mapping[float, str], tolerance: float) -> str:
    said = {num_ranks: "your ranks hold the sum, DDP holds the mean",
            1 / num_ranks: "the mean is divided by the number of ranks once more", **hints}
    for factor, message in said.items():
        if np.isclose(times, factor, rtol=tolerance):
            return message
    if abs(times) < 1e-9:
        return "this is 0: was the gradient cleared after it was averaged?"
    what = f"{short(times)} times the mean" if abs(times) >= 1 else f"the mean divided by {short(1 / times)}"
    return f"this is {what}: by what do you divide, and how often?"
