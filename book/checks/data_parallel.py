"""L3, lab 2: averaged gradients, the state that ranks start from and end with, the epochs.

Gradients and states come as one dict per rank, name -> tensor or array; None if there is no gradient.
"""
from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import combinations
from typing import Any

import numpy as np

from book.checks.attribution import Attribution
from book.checks.verdict import (
    REDUCED, SIX_DIGITS, TOLERANCE, CheckFailed, Gradients, StateDict, agree, all_but_rank_0, all_finite, differing,
    finite, flat, furthest, identical, likeliest, magnitude, num_given, refuse, require, short, times, whole,
)
from book.trace import Trace
from book.words import listed

AVERAGED = {  # a gradient that should be the mean over ranks; "times left_out" where some ranks have no gradient
    "times left_out": "this is the mean over the {num_users} ranks that have a gradient, but it must be over all "
                      "{num_ranks}, with zeros for the others",
    "times num_ranks": "your ranks hold the sum, but must hold the mean, as in DDP",
    "over num_ranks": "the mean is divided by the number of ranks once too often",
    "nothing": "this is 0: was the gradient cleared after it was averaged?",
    "added to own": "the mean is added to the rank's own gradient: it must replace it",
    "picked": "the ranks' numbers are combined by the operation {reduction}, but the mean needs their sum, which is "
              "what all_reduce makes by default",
    "in flight": "some gradients are divided before they are added up and some afterwards: nothing may touch the "
                 "tensor between all_reduce(async_op=True) and its wait(), so divide after wait()",
    "only own": "this is {own_times} times the rank's own gradient, and the other ranks have no part in it: is it "
                "all-reduced, and is the all-reduce waited for before its result is used?",
    "missing ranks": "it contains nothing from rank {absent}",
    "scaled": "this is {scaled}: what do you divide by, and how often?",
    "unequal": "the ranks' gradients have the weights {weights}, but each must have {share}",
    "unknown": "this can't be made from the ranks' gradients of this parameter: is each result copied back to the "
               "place it came from, and has everything arrived by then?"}
ACCUMULATED = {  # gradients that should be the mean over ranks and micro-batches
    "times num_micro_batches": "this is the sum over the micro-batches, whose losses are means: divide by the number "
                               "of micro-batches",
    "last whole": "the last micro-batch weighs {num_micro_batches} times as much as the others: divide its loss by the "
                  "number of micro-batches too",
    "only last micro_batches": "only the last micro-batch is in it: are gradients cleared between micro-batches?",
    "last alone": "only each rank's last micro-batch is in it: are gradients cleared between micro-batches, or does "
                  "only the last one have a backward?",
    "only own": "the other ranks have no part in the gradients: one backward must be synchronised, the last one",
    "missing micro_batches": "the other ranks' micro-batches {absent} have no part in it. An all-reduce sends what has "
                             "been accumulated by then, so the synchronised backward must be the last one. Its forward "
                             "must be outside no_sync too, since DDP decides there",
    "scaled": "every micro-batch weighs {times} times what it should: DDP already divides by the number of ranks, so "
              "divide only by the number of micro-batches",
    "unequal": "the micro-batches weigh between {lowest} and {highest}, but each should weigh {share}",
    "unknown": "this is not a sum of the micro-batches' gradients"}
SENT_AS_IT_IS = "it was converted to float32 on the way: send each tensor in its own dtype"


# Gradients

def averaged(before: Sequence[Gradients], after: Sequence[Gradients], frozen: Collection[str] = (),
             hints: Mapping[float, str] = {}, tolerance: float = TOLERANCE) -> float:
    """Every rank must hold the mean over ranks of the gradients in `before`; a None there counts as zeros.

    `frozen` names the parameters that must stay without a gradient. `hints` maps a factor to the message for gradients
    that are that many times the mean. `tolerance` is relative to a parameter's largest gradient. Returns the sum of the
    mean's absolute values, which does not depend on how the ranks rounded.
    """
    require(len(before) == len(after), f"there are {len(before)} ranks, but {len(after)} results")
    for rank, name in ((rank, name) for rank, own in enumerate(after) for name in frozen if own[name] is not None):
        raise CheckFailed(f"rank {rank} now has a gradient for {name}, which is frozen, and an optimizer with weight "
                          "decay would change it: leave parameters alone that don't require a gradient")
    own = {name: _rows(before, name) for name in before[0] if any(given[name] is not None for given in before)}
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
    """Every rank must hold the mean, or that times the number of ranks, made from numbers of `num_bits` bits.

    These are the bits of the significand, with the leading one: 8 for bfloat16, 11 for float16. Rounding errors may be
    up to one in 2^(num_bits - 3) of a parameter's largest gradient, but must cancel to half a percent over all of them.
    Returns what `averaged` does.
    """
    total = averaged(before, after, tolerance=2.0 ** (3 - num_bits))
    mean = np.mean([whole(gradients) for gradients in before], axis=0)
    for rank, got in enumerate(whole(gradients) for gradients in after):
        require(abs(times(got, mean) - 1) <= 0.005, f"rank {rank}: the gradients are {times(got, mean):.3f} times the "
                "mean, and rounding does not explain that: what do you divide by?")
        bits = next(bits for bits in (num_bits, 11, 24) if _fits(got, bits) or _fits(got * len(before), bits))
        require(bits == num_bits, f"rank {rank}: the gradients were sent with {bits} significant bits, not {num_bits}: "
                "which dtype does the tensor that you send have?")
    return total


def weights_kept(before: Sequence[StateDict], after: Sequence[StateDict]) -> None:
    """Averaging gradients must leave every rank's weights as they were."""
    for rank, (own, now) in enumerate(zip(before, after)):
        for name in differing(own, now):
            raise CheckFailed(f"rank {rank}'s {name} has changed: average the gradients (p.grad), not the parameters, "
                              "which the optimizer changes afterwards")


def accumulated(single: Sequence[Sequence[Gradients]], after: Sequence[Gradients], trace: Trace) -> float:
    """Every rank must hold the mean over ranks and micro-batches, made by one all-reduce.

    `single[rank][m]` are the gradients of a rank's micro-batch m by itself. Returns the sum of the absolute values of
    what rank 0 holds.
    """
    rows = np.array([[finite(rank, "a micro-batch's gradients", whole(gradients)) for gradients in own]
                     for rank, own in enumerate(single)])
    last = np.arange(rows.shape[1]) == rows.shape[1] - 1
    weights = {"last whole": np.where(last, 1, 1 / len(last)), "last alone": last / len(last)}
    mistakes = {name: np.tile(each / len(rows), len(rows)) for name, each in weights.items()}
    for rank, gradients in enumerate(after):
        found = Attribution(finite(rank, "its gradients", whole(gradients)), rows, 1 / rows[:, :, 0].size, rank,
                            ("ranks", "micro_batches"), {"num_micro_batches": rows.shape[1]})
        found.require_right(ACCUMULATED, mistakes, where=f"rank {rank}: ")
    issued = len([event for event in trace.of_rank(0) if event.op == "all_reduce"])
    require(issued <= 1, f"the gradients are right, but took {issued} all-reduces instead of one: put the forward and "
            "backward of all micro-batches but the last inside no_sync")
    return magnitude(whole(after[0]))


def _fits(values: np.ndarray, num_bits: int) -> bool:
    """Whether all numbers have at most `num_bits` significant bits, to one part in a million."""
    significand, exponent = np.frexp(values)
    rounded = np.ldexp(np.round(np.ldexp(significand, num_bits)), exponent - num_bits)
    return bool(np.allclose(values, rounded, rtol=1e-6, atol=0))


def _rows(gradients: Sequence[Gradients], name: str) -> np.ndarray:
    """One parameter's gradients, shape (R, n), with zeros for None; CheckFailed for nan and inf."""
    size = next(flat(own[name]).size for own in gradients if own[name] is not None)
    return np.stack([np.zeros(size) if own[name] is None else
                     finite(rank, f"its own gradient of {name}", flat(own[name]))
                     for rank, own in enumerate(gradients)])


def _why_not_averaged(own: Mapping[str, np.ndarray], after: Sequence[Gradients], faults: Sequence[tuple[int, str]],
                      hints: Mapping[float, str], tolerance: float) -> str:
    rank, name = faults[0]
    if all(after[rank][name] is None for rank, name in faults):
        if all(gradients[name] is None for gradients in after):
            return (f"no rank has a gradient for {name} any more: is p.grad set to what dist.all_reduce returns? It "
                    "works in place and returns None")
        return (f"rank {rank} has no gradient for {name}, but other ranks have one: a rank that did not use a "
                "parameter must take part with zeros, and gets the mean like the others")
    faults = [(rank, name) for rank, name in faults if after[rank][name] is not None]
    kept = [name for name, rows in own.items() if all(
        agree(g[name], row, rows) or (g[name] is None and not row.any()) for g, row in zip(after, rows))]
    if len(kept) == len(own):
        return ("every rank still has its own gradients: all-reduce each, wait for it, and write the result into the "
                "gradient (p.grad /= N does that, g = g / N makes a new tensor)")
    if kept and set(kept) <= {name for _, name in faults}:
        return (f"{kept[0]} is still each rank's own, while other gradients are averaged: was this one sent, waited "
                "for and copied back?")
    if shared := _why_shared_zeros(own, after):
        return shared
    several = any(rows.any(axis=1).sum() > 1 for rows in own.values())
    for source in range(len(after)):
        if several and all(agree(gradients[name], own[name][source], own[name]) for gradients in after for name in own):
            return (f"every rank holds rank {source}'s gradients: a broadcast copies one rank's to all, but all_reduce "
                    "adds up those of all")
    if all_but_rank_0({rank for rank, _ in faults}, len(after)):
        return REDUCED.format("the mean")
    rank = faults[0][0]
    name = max((n for r, n in faults if r == rank), key=lambda n: own[n].shape[1])  # the largest one tells most
    return f"rank {rank}, {name}: {_why_no_mean(rank, name, own, after[rank][name], hints, tolerance)}"


def _why_shared_zeros(own: Mapping[str, np.ndarray], after: Sequence[Gradients]) -> str:
    """The message if a rank holds the same numbers for two gradients that it lacked; "" otherwise."""
    for rank, gradients in enumerate(after):
        lacked = [name for name, rows in own.items() if gradients[name] is not None and not rows[rank].any()]
        for one, other in combinations(lacked, 2):
            if flat(gradients[one]).any() and identical(gradients[one], gradients[other]):
                return (f"rank {rank} had no gradient for {one} and {other}, and now holds the same numbers for both. "
                        "They share one tensor of zeros, which the first all-reduce fills: make new zeros for each")
    return ""


def _why_no_mean(rank: int, name: str, own: Mapping[str, np.ndarray], got: Any, hints: Mapping[float, str],
                 tolerance: float) -> str:
    rows, used = own[name], own[name].any(axis=1)
    left_out = {} if used.all() else {"left_out": len(rows) / used.sum()}
    found = Attribution(got, rows, 1 / len(rows), rank, counts=left_out | {"num_ranks": len(rows)}, tolerance=tolerance)
    for other, theirs in own.items() if found.factors is None and found.times is None else ():
        if other != name and theirs.shape == rows.shape and not agree(got, rows.mean(axis=0), rows, SIX_DIGITS) and (
                Attribution(got, np.concatenate([rows, theirs])).factors is not None):
            why = ("the ranks made their all-reduces in different orders" if used.all() else
                   "a rank that has no gradient for it skipped its all-reduce, or called it at another place")
            return (f"this is mixed with gradients of {other}: {why}, and the first call of one rank meets the first "
                    "of every other")
    factor = found.times or 1.0
    scaled = f"{short(factor)} times the mean" if abs(factor) >= 1 else f"the mean divided by {short(1 / factor)}"
    return found.explain(AVERAGED, hints={} if left_out and found.is_times(left_out["left_out"]) else hints,
                         num_users=used.sum(), scaled=scaled)


# The state at the start and at the end

def same_state(before: Sequence[StateDict], after: Sequence[StateDict], parameters: Sequence[str],
               unsaved: Collection[str] = ()) -> float:
    """Every rank must hold what rank 0 held before, parameters and buffers alike.

    `parameters` says which of the names are parameters, `unsaved` which are buffers that a state_dict leaves out.
    Returns the sum of absolute values of that state.
    """
    for name in differing(before[0], after[0]):
        raise CheckFailed(f"rank 0's {name} " + _why_root_changed([flat(own[name]) for own in before], after[0][name]))
    wrong = [(rank, name) for rank in range(1, len(before)) for name in differing(before[0], after[rank])]
    if wrong:
        raise CheckFailed(_why_not_rank_0(wrong, before, after, parameters, unsaved))
    return sum(map(magnitude, before[0].values()))


def trained_alike(starts: Sequence[Any], ends: Sequence[Any], expected: Any) -> float:
    """All ranks must end with `expected`, the weights of one process that starts with rank 0's.

    Weights come as one flat tensor per rank. Returns the sum of their absolute values at the end.
    """
    starts, ends = all_finite(starts, "the weights at the start"), all_finite(ends, "the weights at the end")
    expected = flat(expected)
    for rank, end in enumerate(ends):
        require(end.shape == expected.shape,
                f"rank {rank} ends with {end.size} weights, one process with {expected.size}")
    rank, apart = furthest(ends)
    kept = np.allclose(ends[rank] - ends[0], starts[rank] - starts[0], rtol=1e-6)
    require(apart <= TOLERANCE, f"ranks 0 and {rank} end with different weights: " + (
        "they differ by as much as before the first step. Averaged gradients move all ranks alike, but nothing made "
        "the ranks equal at the start" if kept else "their gradients differ too: are they averaged in every step?"))
    require(agree(ends[0], expected),
            "the ranks end with the same weights, but not with those of one process that starts from rank 0's and "
            "trains on the whole batches: broadcast rank 0's before the first step, and average gradients in every "
            "step. Is it the same optimizer, with the same learning rate, and are gradients cleared before each step?")
    return magnitude(expected)


def _why_root_changed(before: Sequence[np.ndarray], got: Any) -> str:
    others = [rank for rank, other in enumerate(before) if identical(got, other)]
    return likeliest(
        (np.allclose(flat(got), np.mean(before, axis=0)),
         "is now the mean over ranks, but it must be rank 0's: use a broadcast, which averages nothing"),
        (others, f"is now what rank {listed(others[:1])} had, but the source must be rank 0 (src=0)"),
        (agree(got, before[0], tolerance=SIX_DIGITS), f"has changed from the seventh digit on: {SENT_AS_IT_IS}"),
        (True, "has changed, but rank 0 must keep what it has, and the others get that"))


def _why_not_rank_0(wrong: Sequence[tuple[int, str]], before: Sequence[StateDict], after: Sequence[StateDict],
                    parameters: Sequence[str], unsaved: Collection[str]) -> str:
    differ = [(rank, name) for rank in range(1, len(before)) for name in differing(before[0], before[rank])]
    kept = [(rank, name) for rank, name in wrong if identical(after[rank][name], before[rank][name])]
    rank, name = (kept or wrong)[0]
    names, trainable = {name for _, name in kept}, {name for _, name in differ if name in parameters}
    return likeliest(
        (kept == differ, "every tensor is unchanged: broadcast into the module's own tensors, or copy_() into them. An "
         "optimizer made earlier does not know of copies or new parameters"),
        (kept and names <= set(unsaved), f"{name} is still each rank's own: a state_dict leaves out buffers that are "
         "registered with persistent=False, but module.buffers() has them all"),
        (kept and names == {name for _, name in differ} - trainable,
         f"the buffers are still each rank's own, for example {name}: the state is more than the parameters"),
        (kept and names == trainable, "the buffers are rank 0's, but the parameters that the module had, for example "
         f"{name}, are still each rank's own: did you put new ones in their place? An optimizer made earlier holds the "
         "old ones"),
        (kept, f"rank {rank} still has its own {name}: some of the module's parameters and buffers are not sent, or "
         "not waited for"),
        (agree(after[rank][name], before[0][name], tolerance=SIX_DIGITS),
         f"rank {rank}'s {name} is rank 0's only to six digits: {SENT_AS_IT_IS}"),
        (True, f"rank {rank}'s {name} is neither its own nor rank 0's: do all ranks send their tensors in the same "
         "order?"))


# Epochs

def epochs(orders: Sequence[Sequence[Sequence[int]]], num_examples: int, num_epochs: int) -> list[int]:
    """Each epoch must show every example once, on one of the ranks, in another order than the epochs before.

    Ranks must not keep their examples: with three epochs or more, chance alone hardly gives each the same ones in all.
    `orders[rank][epoch]` lists the examples that a rank gets. Returns rank 0's first example of every epoch.
    """
    for rank, own in enumerate(orders):
        require(num_given(own) == num_epochs, f"rank {rank} returned {num_given(own)} epochs instead of {num_epochs}: "
                "return one list of examples for each")
    shuffled = [[list(share) for share in shares] for shares in zip(*orders)]
    for epoch, shares in enumerate(shuffled):
        _check_shares(epoch, shares, num_examples)
        require(shares not in shuffled[:epoch], f"epoch {epoch} has the order of epoch {shuffled.index(shares)}: "
                "DistributedSampler shuffles by its seed plus the epoch, and its epoch stays 0 unless you call "
                "set_epoch before each epoch")
    require(all(any(share != sorted(share) for share in shares) for shares in shuffled),
            "an epoch comes in the order of the data set, but it should be shuffled")
    kept = all(sorted(share) == sorted(first) for shares in shuffled for share, first in zip(shares, shuffled[0]))
    refuse(kept and len(orders) > 1 and num_epochs > 2, "each rank has the same examples in every epoch, only in "
           "another order: shuffle the whole data set, alike on all ranks, and then cut it, as DistributedSampler does "
           "after set_epoch")
    return [int(own[0]) for own in orders[0]]


def _check_shares(epoch: int, shares: Sequence[Sequence[int]], num_examples: int) -> None:
    """The ranks' shares of one epoch must hold each example once."""
    for rank, share in enumerate(shares):
        require(len(share), f"rank {rank} gets no example in epoch {epoch}")
        for example in (example for example in (min(share), max(share)) if not 0 <= example < num_examples):
            raise CheckFailed(f"rank {rank} gets example {example} in epoch {epoch}, but there are only 0 to "
                              f"{num_examples - 1}")
    seen = np.bincount(np.concatenate([np.asarray(share, dtype=int) for share in shares]), minlength=num_examples)
    absent = np.flatnonzero(seen == 0)
    refuse(len(shares) > 1 and all(len(set(share)) == num_examples for share in shares), f"in epoch {epoch} each rank "
           f"takes all {num_examples} examples: the sampler cuts them into num_replicas shares and takes the share of "
           "rank, so pass the group's size and this rank's number")
    refuse(seen.max() == 1 and len(absent), f"in epoch {epoch} example {listed(absent)} of 0 to {num_examples - 1} is "
           "left out on every rank, though none comes twice: is a share cut short (drop_last, a slice)?")
    require(seen.max() == 1, f"in epoch {epoch} example {seen.argmax()} comes {seen.max()} times and {len(absent)} of "
            f"{num_examples} don't come at all: all ranks must cut the same permutation, so they need the same seed "
            "and epoch")
