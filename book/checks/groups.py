"""L3: sums over groups of ranks, of ranks that call in another order, and of ranks that have nothing to add.

What a rank holds is taken apart into multiples of the ranks' data (see `compare.multiples`), so the message can say
over whom it summed. Shapes: R ranks, n elements with n >= R; `before` and `after` have an entry per rank.
"""
from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from book.checks.buffers import before_and_after
from book.checks.compare import agree, all_but_rank_0, is_own, is_zero, multiples
from book.checks.verdict import CheckFailed, listed, short
from book.trace import Trace

GRID = ("partial", "gradient", "batch")


def on_grid(before: Sequence[Sequence[Any]], after: Sequence[Sequence[Any]], columns: int) -> int:
    """Rank r stands in row r // columns and column r % columns, and holds (partial, gradient, batch), each (n,).

    Afterwards `partial` must be the sum over its row, `gradient` the mean over its column, and `batch` that of the
    first rank in its row. Returns the sum of all ranks' `partial` and `batch`.
    """
    total = 0.0
    for name, own, now in zip(GRID, zip(*before), zip(*after)):
        rows, got = before_and_after(own, now)
        wanted = [_wanted_on_grid(name, rank, len(rows), columns) for rank in range(len(rows))]
        right = np.array([agree(now, factors @ rows, rows) for now, factors in zip(got, wanted)])
        if not right.all():
            rank = int(np.argmin(right))
            raise CheckFailed(_why_reduced(name, columns, right) or
                              _why_not_on_grid(name, rank, columns, wanted[rank], rows, got[rank]))
        total += got.sum() if name != "gradient" else 0
    return round(total)


def names_of_no_order(*stems: str) -> list[str]:
    """A name that begins with each of `stems`, such that a set of two to four of them keeps the order they came in.

    Ranks forked from one process hash strings alike, so that their sets agree on an order, as those of processes that
    torchrun starts don't. These names all ask for the first place in a set's table of eight.
    """
    return [next(name for number in itertools.count() if hash(name := f"{stem}_{number}") % 8 == 0) for stem in stems]


def summed_metrics(before: Sequence[Mapping[str, Any]], after: Sequence[Mapping[str, Any]],
                   trace: Trace | None = None) -> int:
    """Under every name each rank must hold the sum over ranks, (n,). Returns the sum of all of one rank's numbers.

    `trace` is the run's recording; it tells whether barriers were tried.
    """
    gone = [(rank, name) for rank, now in enumerate(after) for name in sorted(before[0]) if name not in now]
    if gone:
        raise CheckFailed(f"rank {gone[0][0]}'s {gone[0][1]!r} is gone: the dict must keep its names")
    own = {name: before_and_after([rank[name] for rank in before], [rank[name] for rank in after])
           for name in sorted(before[0])}
    rows = {name: pair[0] for name, pair in own.items()}
    faults = [(rank, name) for name, (theirs, now) in own.items() for rank in range(len(now))
              if not agree(now[rank], theirs.sum(axis=0), theirs)]
    if not faults:
        return round(sum(theirs.sum() for theirs in rows.values()))
    if all_but_rank_0({rank for rank, _ in faults}, len(before)):
        raise CheckFailed("only rank 0 holds the sums: reduce gives them to one rank, all_reduce to every rank")
    for name, (theirs, now) in own.items():
        if (kept := _why_kept(theirs, now)):
            raise CheckFailed(f"{name!r} {kept}")
    rank, name = min(faults)
    fault = _why_not_summed(rank, name, rows, own[name][1][rank])
    if trace is not None and "barrier" in {event.op for event in trace.of_kind("collective")}:
        fault += ". A barrier makes the ranks wait for one another, it does not change which call meets which"
    raise CheckFailed(f"rank {rank}'s {name!r} {fault}")


def sample_mean(before: Sequence[Any], after: Sequence[Any], num_samples: Sequence[int]) -> float:
    """`before` holds sums over each rank's samples, (n,); every rank must end with the mean over all samples.

    Returns the sum of one rank's result.
    """
    rows, got = before_and_after(before, after)
    mean = rows.sum(axis=0) / sum(num_samples)
    wrong = [rank for rank in range(len(rows)) if not agree(got[rank], mean, rows)]
    if not wrong:
        return float(got[0].sum())
    if all_but_rank_0(wrong, len(rows)):
        raise CheckFailed("only rank 0 holds the mean: reduce gives the result to one rank, all_reduce to every rank")
    fault = _why_not_the_mean(wrong[0], rows, got[wrong[0]], np.array(num_samples, dtype=float), len(wrong))
    raise CheckFailed(f"rank {wrong[0]} {fault}")


def _wanted_on_grid(name: str, rank: int, num_ranks: int, columns: int) -> np.ndarray:
    """How much of each rank's data rank `rank` must hold, shape (R,)."""
    ranks = np.arange(num_ranks)
    if name == "partial":
        return (ranks // columns == rank // columns).astype(float)
    if name == "gradient":
        return (ranks % columns == rank % columns) * columns / num_ranks
    return (ranks == rank // columns * columns).astype(float)


def _why_reduced(name: str, columns: int, right: np.ndarray) -> str:
    """Why only one rank of each group has its result; "" if that is not so. `right` tells it by rank, shape (R,)."""
    places = right.reshape(-1, columns) if name == "partial" else right.reshape(-1, columns).T
    group = {"partial": "row", "gradient": "column"}.get(name)
    if not group or not (places == places[0]).all() or places[0].sum() != 1:
        return ""
    return (f"`{name}` is right on {'the first' if places[0, 0] else 'one'} rank of each {group} alone: reduce gives "
            "the result to one rank, all_reduce to every rank")


def _why_not_on_grid(name: str, rank: int, columns: int, wanted: np.ndarray, rows: np.ndarray, got: np.ndarray) -> str:
    head, factors = f"rank {rank}'s `{name}`", multiples(rows, got)
    if factors is None:
        return (f"{head} is made of something else than the ranks' `{name}`s: is each given to its own collective, and "
                "with async_op=True waited for before it is used?")
    ranks = np.arange(len(rows))
    sets = {"its row": ranks // columns == rank // columns, "its column": ranks % columns == rank % columns,
            "all ranks": ranks >= 0}
    (held, over), (right, over_right) = _described(factors, sets), _described(wanted, sets)
    if is_own(factors, rank):
        return (f"{head} is as it was before, and must be {right}: does the rank take part, in a group that it belongs "
                "to, and in place? With async_op=True, does it wait?")
    hint = "; without a group=... the collective takes in the whole world" if over == "all ranks" else ""
    if {over, over_right} == {"its row", "its column"}:
        hint = "; are rows and columns exchanged?"
    return f"{head} is {held}, and must be {right}{hint}"


def _described(factors: np.ndarray, sets: Mapping[str, np.ndarray]) -> tuple[str, str]:
    """Multiples of the ranks' data in words, and over which of the sets they are, "" if none.

    For example ("the sum over its row (ranks 0, 1)", "its row").
    """
    inside = ~is_zero(factors)
    ranks, shares = np.flatnonzero(inside).tolist(), factors[inside]
    names = listed(ranks)
    if len(ranks) < 2:
        alone = f"rank {names}'s" + ("" if np.allclose(shares, 1) else f" times {short(shares.sum())}")
        return (alone if ranks else "zero"), ""
    group = next((name for name, members in sets.items() if np.array_equal(members, inside)), "")
    over = f"{group} (ranks {names})" if group else f"ranks {names}"
    if np.allclose(shares, 1 / len(ranks)):
        return f"the mean over {over}", group
    if not np.allclose(shares, shares[0]):
        return f"a sum over {over} with the weights {listed(map(short, shares))}", group
    return f"the sum over {over}" + ("" if np.allclose(shares, 1) else f" times {short(shares[0])}"), group


def _why_not_summed(rank: int, name: str, rows: Mapping[str, np.ndarray], got: np.ndarray) -> str:
    own, order = rows[name], "all ranks must call their collectives in one order"
    factors = multiples(own, got)
    if factors is not None:
        return _why_factors(rank, factors, order)
    for other, theirs in rows.items():
        mixed = multiples(np.concatenate([own, theirs]), got) if other != name else None
        if mixed is not None:
            strangers = np.flatnonzero(~is_zero(mixed[len(own):]))
            return f"has rank {listed(strangers)}'s {other!r} added to it: {order}"
    return (f"is no sum of anything that the ranks had: bytes were added that don't have the same dtype, so {order}")


def _why_kept(before: np.ndarray, after: np.ndarray) -> str:
    """Why every rank holds what one rank had before; "" if that is not so."""
    if np.array_equal(before, after):
        return "is on every rank as it was before: is it all-reduced, waited for, and in the dict that was given?"
    for rank, numbers in enumerate(before):
        if (after == numbers).all():
            return f"is on every rank what rank {rank} had: a broadcast copies, it does not add"
    return ""


def _why_factors(rank: int, factors: np.ndarray, order: str) -> str:
    missing = np.flatnonzero(is_zero(factors))
    if np.allclose(factors, 1 / len(factors)):
        return "is the mean, and the sum is asked for: counts don't average"
    if is_own(factors, rank):
        return ("is as it was before, and others' is not: did its all-reduce meet that of another tensor, or was it "
                f"not waited for (async_op)? {order}")
    if len(missing):
        return f"lacks what rank {listed(missing)} had, which met another collective: {order}"
    return f"counts the ranks {listed(map(short, factors))} times"


def _why_not_the_mean(rank: int, rows: np.ndarray, got: np.ndarray, num_samples: np.ndarray, num_wrong: int) -> str:
    """What rank `rank` holds: multiples of the sums of those ranks that have samples."""
    if np.isnan(got).any():
        return "holds nan: was zero divided by zero, on a rank without samples?"
    has_samples = num_samples > 0
    if not has_samples[rank] and not got.any():
        return ("had no samples and holds zeros: it needs the mean as much as the others, or its weights will drift "
                "away from theirs")
    factors, total = multiples(rows, got), num_samples.sum()
    if factors is None:
        return "holds nothing that can be made from the ranks' sums"
    factors, counts = factors[has_samples], num_samples[has_samples]
    own = np.flatnonzero(has_samples) == rank
    if has_samples[rank] and is_zero(factors[~own]).all():
        return "holds nothing but its own samples: is everything in place, and all-reduced?"
    said = {
        "holds the sum: divide by the number of samples of all ranks": np.ones(len(counts)),
        "has divided by the number of ranks: they have different numbers of samples":
            np.full(len(counts), 1 / len(num_samples)),
        "has divided by its own number of samples": np.full(len(counts), 1 / max(num_samples[rank], 1)),
        "holds the mean of the ranks' means, which counts a sample of a small shard more than one of a large one":
            1 / (counts * len(num_samples)),
        "holds the mean of the ranks' means, over the ranks that have samples: it still counts a sample of a small "
        "shard more": 1 / (counts * len(counts)),
        "holds the sum of the ranks' means, divided by the number of all samples: a mean counts as often as it has "
        "samples": 1 / (counts * total),
        "holds the sum of the ranks' means": 1 / counts}
    found = next((text for text, mistaken in said.items() if np.allclose(factors, mistaken)), None)
    ranks, weights = listed(np.flatnonzero(has_samples)), listed(map(short, factors))
    return found or (f"weighs the samples of ranks {ranks} by {weights}, and each must count 1/{short(total)}" +
                     (": this rank alone is wrong" if num_wrong == 1 else ""))
