"""L3, lab 1: whose data ranks hold after a copy, and over which ranks they summed.

Shapes: R ranks, n elements with n >= R; `before` and `after` have an entry per rank. Copies are compared exactly, so
random whole numbers tell whose they are. Out-of-place collectives fill a tensor of R rows, in the order of the ranks
that they come from.
"""
from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from book.checks.attribution import Attribution, in_words, is_zero
from book.checks.recordings import point_to_point
from book.checks.verdict import (
    REDUCED, CheckFailed, agree, all_but_rank_0, before_and_after, buffers_of, likeliest, refuse, require,
    short,
)
from book.trace import Trace
from book.words import listed

BROADCAST = {  # a buffer that should be the root's
    "nothing": "holds zeros: was `buffer` filled from a tensor that nothing had been received into?",
    "own": "still holds its own data: does it receive into `buffer` itself, not into another tensor?",
    "other": "holds rank {other}'s data, but the root is rank {root}: nobody else's data may be sent",
    "added to own": "holds its own data plus the root's: a broadcast replaces, it does not add",
    "unknown": "holds something that is not any rank's data"}
GATHERED = {  # a row that should be that of rank `source`
    "nothing": "row {source} is all zeros: is there a receive from rank {source}, into that row?",
    "other": "row {source} holds rank {other}'s numbers, but what comes from rank s belongs in row s",
    "unequal": "row {source} holds a sum of several ranks' numbers, but an all-gather keeps them apart",
    "unknown": "row {source} holds something that no rank had"}
ORDER = "all ranks must call their collectives in the same order"
METRICS = {  # a tensor of the dict that should be summed
    "mean": "is the mean, but should be the sum: counts are added, not averaged",
    "own": f"is unchanged, but that of other ranks is not: did its all-reduce meet that of another tensor? {ORDER}",
    "missing ranks": f"lacks the part of rank {{absent}}, which met another collective: {ORDER}",
    "unequal": "contains the ranks' parts {weights} times, but each belongs in it once"}
MEANS = {  # the mean over all samples; the names of mistakes are those in `_wrong_means`
    "only own": "holds nothing but its own samples: is everything all-reduced, and the mean written in place?",
    "sum": "holds the sum: divide by the number of samples of all ranks",
    "by ranks": "has divided by the number of ranks, but ranks have different numbers of samples",
    "by its own": "has divided by its own number of samples, not by that of all ranks",
    "mean of means": "holds the mean of the ranks' means, which counts a sample of a small shard more than one of "
                     "a large one",
    "mean of those": "holds the mean of the ranks' means, over the ranks that have samples, which still counts a "
                     "sample of a small shard more than one of a large one",
    "means by all": "holds the sum of the ranks' means, divided by the number of all samples: multiply each mean by "
                    "its number of samples",
    "sum of means": "holds the sum of the ranks' means",
    "unequal": "weighs the samples of ranks {ranks} by {weights}, but each must count 1/{total}{alone}",
    "unknown": "holds nothing that can be made from the ranks' sums"}


# Copies

def broadcast(before: Sequence[Any], after: Sequence[Any], root: int) -> int:
    """Every rank's buffer, (n,), must hold what `root` held before. Returns the sum of one buffer."""
    before, after = before_and_after(before, after)
    require(after.shape == before.shape,
            f"the buffers had {before.shape[1]} elements and now have {after.shape[1]}: work in place")
    for other in set(range(len(before))) - {root}:
        refuse((after == before[other]).all(), f"every rank holds rank {other}'s data, but the root is rank {root}: "
               "the root is an argument, and can be any rank")
    require((after[root] == before[root]).all(),
            f"rank {root} is the root, but its buffer has changed: a root only sends")
    for rank, buffer in enumerate(after):
        arrived = buffer == before[root]
        if arrived.all():
            continue
        refuse(arrived.any() and set(buffer) <= {*before[root], *before[rank]}, f"rank {rank} holds the root's data in "
               f"only {arrived.sum()} of {buffer.size} places: the whole buffer must arrive")
        _check_reach(before, after, root)
        refuse(buffer[0] in range(1, len(before)) and (buffer == buffer[0]).all(), f"rank {rank} holds the number "
               f"{buffer[0]:.0f} in every place: recv returns the sender's number, and the data is in the tensor that "
               "you gave it")
        found = Attribution(buffer, before, np.arange(len(before)) == root, rank)
        raise CheckFailed(f"rank {rank} " + found.explain(BROADCAST, root=root))
    return round(before[root].sum())


def _check_reach(before: np.ndarray, after: np.ndarray, root: int) -> None:
    """The root's data must not have stopped at the highest rank."""
    reached, kept = (after == before[root]).all(axis=1), (after == before).all(axis=1)
    refuse(kept[:root].any() and (reached | kept)[:root].all() and reached[root:].all() and reached[root + 1:].any()
           and not reached[:root].any(), "the ranks below the root still have their own data, and those above it the "
           "root's: count ranks from the root, (rank - root) % world_size, so that rank 0 follows "
           "the highest")


def received_once(trace: Trace, num_bytes: int, root: int) -> int:
    """In a broadcast of `num_bytes` made of sends and receives, every rank but the root must receive just that; the
    root receives less.

    Returns the bytes that the root sent.
    """
    if trace.world_size == 1:
        return 0
    point_to_point(trace)
    arrived = trace.of_kind("recv")
    received = np.bincount(arrived.array("rank"), weights=arrived.array("num_bytes"), minlength=trace.world_size)
    busiest = int(np.argmax(received))
    laziest = min(set(range(trace.world_size)) - {root}, key=lambda rank: received[rank])
    require(received[busiest] <= num_bytes, f"rank {busiest} received {received[busiest] / num_bytes:.2g} times the "
            "buffer, but it needs one copy: only a rank that has the root's data may send, and only once to each other "
            "rank")
    require(received[laziest] >= num_bytes, f"rank {laziest} received {received[laziest]:g} bytes, but the buffer has "
            f"{num_bytes:g}: is it sent whole, in its own dtype?")
    require(received[root] < num_bytes,
            f"rank {root} is the root, but it received the whole buffer: who sends it what it already has?")
    return round(trace.message_bytes()[root])


def all_gather_rows(before: Sequence[Any], after: Sequence[Any]) -> int:
    """Row s of every rank's `after`, (R, n), must be rank s's `before`, (n,). Returns the sum over one rank's rows."""
    before = buffers_of(before)
    after = _rows(after, before.shape[1])
    right = (after == before).all(axis=(1, 2))
    if right.all():
        return round(before.sum())
    refuse(right[0] and not right[1:].any() and not after[1:].any(),
           "only rank 0 has the rows, as in a gather; in an all-gather every rank gets them")
    refuse(len(before) > 1 and (after[:, 0] == before).all(), "every rank has its own numbers in row 0: your rows are "
           "in the order in which you handled them, but they belong in the order of the ranks")
    rank = int(np.argmin(right))
    raise CheckFailed(f"rank {rank}: {_why_not_gathered(rank, before, after[rank])}")


def all_to_all_rows(before: Sequence[Any], after: Sequence[Any]) -> int:
    """Row s of rank r's `after` must be row r of rank s's `before`, both (R, n). Returns the sum of rank 0's rows."""
    length = buffers_of(before).shape[1] // len(before)
    before, after = _rows(before, length), _rows(after, length)
    for rank, rows in enumerate(after):
        require(rows.any(), f"rank {rank}: `incoming` is as it was, all zeros: fill the tensor that you were given "
                "(incoming[s] = ... does, incoming = ... makes a new one), after wait()")
    for rank, source in np.ndindex(len(before), len(before)):
        if not np.array_equal(after[rank, source], before[source, rank]):
            raise CheckFailed(f"rank {rank}'s row {source} {_why_not_exchanged(rank, source, before, after)}")
    return round(after[0].sum())


def rows_sent(trace: Trace, row_bytes: int) -> int:
    """In an all-to-all made of sends and receives a rank sends each other rank one row of `row_bytes`.

    Up to twice as many bytes are accepted, since rows may be passed on; fewer are not. Returns the bytes that rank 0
    sent.
    """
    point_to_point(trace)
    sent, wanted = trace.message_bytes(), (trace.world_size - 1) * row_bytes
    busiest, laziest = int(np.argmax(sent)), int(np.argmin(sent))
    require(sent[laziest] >= wanted, f"rank {laziest} sent {sent[laziest]:g} bytes, but its rows for the others have "
            f"{wanted:g}: does it send all of them, whole, in their own dtype?")
    require(sent[busiest] <= 2 * wanted, f"rank {busiest} sent {sent[busiest] / row_bytes:g} rows, but has only "
            f"{trace.world_size - 1} for the others: is this an all-gather from which each rank picks its part?")
    return round(sent[0])


def _rows(buffers: Sequence[Any], length: int) -> np.ndarray:
    """The rows of all ranks as one array (R, R, n)."""
    flat, num_ranks = buffers_of(buffers), len(buffers)
    require(flat.shape[1] == num_ranks * length, f"a rank returned {flat.shape[1]} elements, but {num_ranks} rows of "
            f"{length} are {num_ranks * length}")
    return flat.reshape(num_ranks, num_ranks, length)


def _why_not_gathered(rank: int, before: np.ndarray, rows: np.ndarray) -> str:
    if not rows.any():
        return ("`out` is as it was, all zeros: fill the tensor that you were given (out[s] = ... does, out = ... "
                "makes a new one)")
    right = (rows == before).all(axis=1)
    for other, theirs in enumerate(before) if len(rows) > 2 else ():
        if np.delete(rows == theirs, rank, axis=0).all():
            return (f"all received rows hold rank {other}'s numbers. If they share one tensor, the last message filled "
                    "it: give every irecv its own row. In a ring, do you pass on what you received, or send your own "
                    "row again?")
    source = int(np.argmin(right))
    if not rows[source].any() and source == rank:
        return f"row {rank}, its own, is all zeros: nobody sends it that row, so copy `mine` there"
    return Attribution(rows[source], before, np.arange(len(rows)) == source).explain(GATHERED, source=source)


def _why_not_exchanged(rank: int, source: int, before: np.ndarray, after: np.ndarray) -> str:
    """What rank `rank` has in row `source` instead of row `rank` of rank `source`."""
    row, wanted = after[rank, source], f"rank {source}'s row {rank}"
    owner, place = [*np.argwhere((before == row).all(axis=2)).tolist(), (None, None)][0]
    return likeliest(
        (not row.any() and source == rank, "is its own, and all zeros: nobody sends it that row, so copy it from "
         "`outgoing`"),
        (not row.any(), f"is all zeros: is there a receive from rank {source}, into that row?"),
        (owner is None, f"holds something that no rank had, but {wanted} belongs there"),
        ((owner, place) == (rank, source), f"holds this rank's own numbers for rank {source}, but {wanted} belongs "
         "there: was anything exchanged, or was a row overwritten before it was sent, so that it came back?"),
        (owner == place == source,
         f"holds rank {source}'s row {source}, which rank {source} keeps for itself: send row d to rank d"),
        (place == rank, f"holds what came from rank {owner}, but what comes from rank s belongs in row s"),
        (True, f"holds rank {owner}'s row {place}, but {wanted} belongs there: which row goes to whom?"))


# Sums

def on_grid(before: Sequence[Sequence[Any]], after: Sequence[Sequence[Any]], columns: int) -> int:
    """Rank r stands in row r // columns and column r % columns, and holds (partial, gradient, batch), each (n,).

    Afterwards `partial` must be the sum over its row, `gradient` the mean over its column, and `batch` that of the
    first rank in its row. Returns the sum of all ranks' `partial` and `batch`.
    """
    ranks, total = np.arange(len(before)), 0.0
    same_row = np.equal.outer(ranks // columns, ranks // columns)
    same_column = np.equal.outer(ranks % columns, ranks % columns)
    wanted = {"partial": same_row, "gradient": same_column * columns / len(ranks),
              "batch": np.equal.outer(ranks // columns * columns, ranks)}
    for name, own, now in zip(wanted, zip(*before), zip(*after)):
        rows, got = before_and_after(own, now)
        found = [Attribution(tensor, rows, wanted[name][rank], rank) for rank, tensor in enumerate(got)]
        right = np.array([one.is_right() for one in found])
        if not right.all():
            rank = int(np.argmin(right))
            sets = {"its row": same_row[rank], "its column": same_column[rank], "all ranks": ranks >= 0}
            raise CheckFailed(_why_reduced(name, columns, right) or _why_not_on_grid(name, rank, found[rank], sets))
        total += got.sum() if name != "gradient" else 0
    return round(total)


def names_of_no_order(*stems: str) -> list[str]:
    """Names that begin with `stems` and hash so that a set of two to four of them keeps the order of insertion.

    Ranks forked from one process hash strings alike, so their sets agree on an order; sets in processes that torchrun
    starts don't. These names all hash to the first of the eight slots in a small set's table.
    """
    return [next(name for number in itertools.count() if hash(name := f"{stem}_{number}") % 8 == 0) for stem in stems]


def summed_metrics(before: Sequence[Mapping[str, Any]], after: Sequence[Mapping[str, Any]],
                   trace: Trace | None = None) -> int:
    """Under every name each rank must hold the sum over ranks, (n,). Returns the sum of all of one rank's numbers.

    `trace` is the run's recording; it tells whether barriers were tried.
    """
    for rank, now in enumerate(after):
        for name in sorted(before[0].keys() - now.keys()):
            raise CheckFailed(f"rank {rank}'s {name!r} is gone: the dict must keep its names")
    held = {name: before_and_after([own[name] for own in before], [now[name] for now in after])
            for name in sorted(before[0])}
    rows = {name: theirs for name, (theirs, _) in held.items()}
    faults = [(rank, name) for name, (theirs, now) in held.items() for rank in range(len(now))
              if not agree(now[rank], theirs.sum(axis=0), theirs)]
    if not faults:
        return round(sum(theirs.sum() for theirs in rows.values()))
    refuse(all_but_rank_0({rank for rank, _ in faults}, len(before)), REDUCED.format("the sums"))
    for name, (theirs, now) in held.items():
        refuse((now == theirs).all(), f"{name!r} is unchanged on every rank: is it all-reduced, in the dict that was "
               "given?")
        for rank, numbers in enumerate(theirs):
            refuse((now == numbers).all(),
                   f"{name!r} is what rank {rank} had, on every rank: a broadcast copies, it does not add")
    rank, name = min(faults)
    fault = _why_not_summed(rank, name, rows, held[name][1][rank])
    called = [event.op for event in trace.of_rank(rank) if event.kind == "collective"] if trace is not None else []
    if "barrier" in called:
        fault += ". A barrier makes the ranks wait for one another, but it does not change which call meets which"
    if len(called) == 1 < len(held):
        fault += ". Here one call carries them all: do all ranks lay them into its tensor in the same order?"
    raise CheckFailed(f"rank {rank}'s {name!r} {fault}")


def sample_mean(before: Sequence[Any], after: Sequence[Any], num_samples: Sequence[int]) -> float:
    """`before` holds sums over each rank's samples, (n,); every rank must end with the mean over all samples.

    Returns the sum of one rank's result.
    """
    rows, got = before_and_after(before, after)
    mean, counts = rows.sum(axis=0) / sum(num_samples), np.array(num_samples, dtype=float)
    wrong = [rank for rank in range(len(rows)) if not agree(got[rank], mean, rows)]
    if not wrong:
        return float(got[0].sum())
    refuse(all_but_rank_0(wrong, len(rows)), REDUCED.format("the mean"))
    rank = wrong[0]
    refuse(np.isnan(got[rank]).any(),
           f"rank {rank} holds nan: was zero divided by zero, on a rank without samples?")
    refuse(not counts[rank] and not got[rank].any(), f"rank {rank} had no samples and holds zeros, but it needs the "
           "mean like the others, or its weights will drift away from theirs")
    fault = Attribution(got[rank], rows, 1 / counts.sum(), rank if counts[rank] else None).explain(
        MEANS, _wrong_means(counts, rank), ranks=listed(np.flatnonzero(counts)), total=short(counts.sum()),
        alone="; only this rank is wrong" * (len(wrong) == 1))
    raise CheckFailed(f"rank {rank} {fault}")


def _why_reduced(name: str, columns: int, right: np.ndarray) -> str:
    """The message if exactly one rank of each group has its result, by `right`, (R,); "" otherwise."""
    places = right.reshape(-1, columns) if name == "partial" else right.reshape(-1, columns).T
    group = {"partial": "row", "gradient": "column"}.get(name)
    if not group or not (places == places[0]).all() or places[0].sum() != 1:
        return ""
    return (f"`{name}` is right only on {'the first' if places[0, 0] else 'one'} rank of each {group}: reduce gives "
            "the result to one rank, all_reduce to every rank")


def _why_not_on_grid(name: str, rank: int, found: Attribution, sets: Mapping[str, np.ndarray]) -> str:
    head = f"rank {rank}'s `{name}`"
    if found.factors is None:
        return (f"{head} is made of something other than the ranks' `{name}`s: does each tensor go into its own "
                "collective, and is that waited for before it is used?")
    (held, over), (right, over_right) = _described(found.factors, sets), _described(found.wanted, sets)
    if any(pattern.name == "own" for pattern in found.patterns()):
        return (f"{head} is unchanged, but must be {right}: does the rank take part, in a group that it belongs to, "
                "and in place?")
    hint = "; without group=... a collective runs over the whole world" if over == "all ranks" else ""
    if {over, over_right} == {"its row", "its column"}:
        hint = "; are rows and columns exchanged?"
    return f"{head} is {held}, but must be {right}{hint}"


def _described(factors: np.ndarray, sets: Mapping[str, np.ndarray]) -> tuple[str, str]:
    """Multiples of the ranks' data in words, and the name of the set of ranks that they are over, "" if none.

    For example ("the sum over its row (ranks 0, 1)", "its row").
    """
    inside = ~is_zero(factors)
    ranks, shares = np.flatnonzero(inside).tolist(), factors[inside]
    if len(ranks) < 2:
        alone = f"rank {listed(ranks)}'s" + ("" if np.allclose(shares, 1) else f" times {short(shares.sum())}")
        return (alone if ranks else "zero"), ""
    group = next((name for name, members in sets.items() if np.array_equal(members, inside)), "")
    over = f"{group} (ranks {listed(ranks)})" if group else f"ranks {listed(ranks)}"
    if np.allclose(shares, 1 / len(ranks)):
        return f"the mean over {over}", group
    if not np.allclose(shares, shares[0]):
        return f"a sum over {over} with the weights {in_words(shares)}", group
    return f"the sum over {over}" + ("" if np.allclose(shares, 1) else f" times {short(shares[0])}"), group


def _why_not_summed(rank: int, name: str, rows: Mapping[str, np.ndarray], got: np.ndarray) -> str:
    found = Attribution(got, rows[name], own=rank)
    if found.factors is not None:
        return found.explain(METRICS)
    for other, theirs in rows.items():
        mixed = Attribution(got, np.concatenate([rows[name], theirs])).factors if other != name else None
        if mixed is not None:
            return f"has rank {listed(np.flatnonzero(~is_zero(mixed[len(theirs):])))}'s {other!r} added to it: {ORDER}"
    return ("is not a sum of anything that the ranks had: did it meet a tensor of another dtype, or is its op not SUM? "
            f"Note that {ORDER}")


def _wrong_means(counts: np.ndarray, rank: int) -> dict[str, np.ndarray]:
    """The coefficients of the ranks' sums that mistakes lead to, by the mistake's name."""
    share = np.divide(1, counts, out=np.zeros_like(counts), where=counts > 0)  # a rank without samples has only zeros
    num_ranks, ones = len(counts), np.ones(len(counts))
    return {"by ranks": ones / num_ranks, "by its own": ones / max(counts[rank], 1), "mean of means": share / num_ranks,
            "mean of those": share / (counts > 0).sum(), "means by all": share / counts.sum(), "sum of means": share}
