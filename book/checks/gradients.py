"""L3: whether every rank holds the mean of all ranks' gradients, and if not, what it holds instead.

Gradients come as one dict per rank, parameter name -> tensor or array, None where there is no gradient. They are
compared in float64, to one part in 10^9 of the largest element: sums in another order differ by about one in 10^15.
What a rank holds instead is found by least squares: every linear mistake is a set of multiples of the ranks' gradients.
"""
from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from book.checks.buffers import flat
from book.checks.verdict import CheckFailed, short

TOLERANCE = 1e-9
Gradients = Mapping[str, Any]


def averaged(before: Sequence[Gradients], after: Sequence[Gradients], frozen: Collection[str] = (),
             hints: Mapping[float, str] = {}, tolerance: float = TOLERANCE) -> float:
    """Every rank must hold the mean over ranks of the gradients in `before`; a None there counts as zeros.

    `frozen` names the parameters that must stay without a gradient. `hints` maps a factor to what to say when the
    gradients are that many times the mean. `tolerance` is a share of a parameter's largest gradient. Returns the sum of
    the absolute values of what rank 0 holds. Raises CheckFailed with the likeliest reason.
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
    faults = [(rank, name) for name, rows in own.items() for rank in range(len(before))
              if not agree(after[rank][name], rows.mean(axis=0), rows, tolerance)]
    if faults:
        raise CheckFailed(_why_not_averaged(own, after, faults, hints, tolerance))
    return sum(float(np.abs(flat(after[0][name])).sum()) for name in own)


def weights_kept(before: Sequence[Gradients], after: Sequence[Gradients]) -> None:
    """Averaging gradients must leave every rank's weights as they were."""
    for rank, (own, now) in enumerate(zip(before, after)):
        for name in own:
            if not np.array_equal(flat(own[name]), flat(now[name])):
                raise CheckFailed(f"rank {rank}'s {name} has changed: average gradients (p.grad), not parameters; it is "
                                  "the optimizer that changes those, afterwards")


def agree(got: Any, want: np.ndarray, scale: np.ndarray, tolerance: float = TOLERANCE) -> bool:
    """Whether `got` is `want` but for rounding, as seen from the largest element of `scale`; None never is."""
    if got is None or flat(got).shape != want.shape:
        return False
    return bool(np.allclose(flat(got), want, rtol=0, atol=tolerance * np.abs(scale).max()))


def multiples(rows: np.ndarray, got: Any) -> np.ndarray | None:
    """The factors f, shape (R,), with f @ rows = got, for `rows` (R, n) and `got` (n,); NaN for a row of zeros.

    None where there are no such factors, or where more than one set of them fits.
    """
    used = rows.any(axis=1)
    got, factors = flat(got), np.full(len(rows), np.nan)
    if got.shape != rows.shape[1:] or np.linalg.matrix_rank(rows[used]) < used.sum():
        return None
    factors[used] = np.linalg.lstsq(rows[used].T, got, rcond=None)[0]
    return factors if agree(factors[used] @ rows[used], got, rows) else None


def _rows(gradients: Sequence[Gradients], name: str) -> np.ndarray | None:
    """One parameter's gradients, shape (R, n), with zeros for None; None where no rank has one."""
    given = [gradient for gradient in (rank[name] for rank in gradients) if gradient is not None]
    if not given:
        return None
    zeros = np.zeros_like(flat(given[0]))
    return np.stack([zeros if rank[name] is None else flat(rank[name]) for rank in gradients])


def _why_not_averaged(own: Mapping[str, np.ndarray], after: Sequence[Gradients], faults: Sequence[tuple[int, str]],
                      hints: Mapping[float, str], tolerance: float) -> str:
    for rank, name in faults:
        if after[rank][name] is None:
            return (f"rank {rank} has no gradient for {name}, but other ranks have one: a rank that did not use a "
                    "parameter takes part with zeros, and gets the mean like the others")
    kept = [name for name, rows in own.items() if all(agree(g[name], row, rows) for g, row in zip(after, rows))]
    if kept and set(kept) <= {name for _, name in faults}:
        return _why_kept(kept, len(own))
    if {rank for rank, _ in faults} == set(range(1, len(after))):
        return "only rank 0 holds the mean: reduce gives the result to one rank, all_reduce to every rank"
    rank = faults[0][0]
    name = max((n for r, n in faults if r == rank), key=lambda n: own[n].shape[1])  # the one that tells most
    got, mean = flat(after[rank][name]), own[name].mean(axis=0)
    times = got @ mean / (mean @ mean) if got.shape == mean.shape and mean.any() else 0.0
    if agree(got, times * mean, own[name], tolerance):
        return f"rank {rank}, {name}: {_why_times(times, len(after), hints, max(tolerance, 1e-6))}"
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


def _why_no_multiples(name: str, own: Mapping[str, np.ndarray], got: np.ndarray) -> str:
    rows = own[name]
    if agree(got, rows.mean(axis=0), rows, tolerance=1e-5):
        return "the mean is right to six digits only: has it been float32 on the way?"
    for other, theirs in own.items():
        if other != name and theirs.shape == rows.shape and multiples(np.concatenate([rows, theirs]), got) is not None:
            return (f"this is mixed with gradients of {other}: the ranks started their all-reduces in different orders, "
                    "and the first of one rank meets the first of every other")
    return ("what is there can't be made from the ranks' gradients of this parameter: is each result copied back to the "
            "place it came from, and has everything arrived by then?")


def _why_factors(rank: int, factors: np.ndarray) -> str:
    """What multiples of the ranks' gradients mean that are not all the same; NaN for a rank without a gradient."""
    given, share = ~np.isnan(factors), 1 / len(factors)
    own = np.arange(len(factors)) == rank
    absent = given & np.isclose(factors, 0, atol=1e-9)
    if absent[given & ~own].all():
        return f"this is {short(factors[rank])} times the rank's own gradient: nothing of the other ranks is in it"
    if np.allclose((factors - own)[given], share):
        return "the mean is added to the rank's own gradient: it must replace it"
    if absent.any():
        return f"nothing of rank {', '.join(map(str, np.flatnonzero(absent)))} is in it"
    weights = ", ".join(short(f) for f in factors[given])
    return f"the ranks' gradients have the weights {weights}; each must have {short(share)}"


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
