"""L3, lab 2: the steps and losses of a global batch that ranks share out.

A first step is attributed to the gradients of the batch's windows, one by one.
"""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from book.checks.attribution import Attribution
from book.checks.formula import Formula
from book.checks.verdict import (
    ROUNDED, SIX_DIGITS, TOLERANCE, CheckFailed, agree, all_finite, flat, furthest, likeliest,
    num_given, refuse, require, same_loss, short, times,
)
from book.trace import parting
from book.words import counted, listed

STEP = {  # a first step that should go along the mean gradient of the batch's windows
    "times num_ranks": "it is {num_ranks} times as long. The global batch is the same, so keep the learning rate, and "
                       "average the gradients instead of summing them",
    "missing windows": "window {absent} of the batch's {size} has no part in it: each window must be on one rank, and "
                       "none may be left out",
    "clipped": "it is {times} times as long, and its length is {length}: do you clip gradients? Plain SGD uses them as "
               "they are",
    "scaled": "it is {times} times as long: do you divide something twice, or multiply it?",
    "unequal": "the windows weigh between {lowest} and {highest}, but each should weigh {share}. If the ranks' shares "
               "are not equal, weight each rank's mean by its number of windows",
    "unknown": "it is not a sum of the gradients of the batch's windows: which windows does it use, and which "
               "optimizer? Do all ranks start from rank 0's weights?"}
PLAIN = "train must make plain SGD steps with a constant learning rate"
SLIPS = {  # mistakes, for which a lab gives the losses that they lead to
    "momentum": f"these are the losses of SGD with a momentum of {{value}}: {PLAIN}",
    "not cleared": "these are the losses of a run in which each step adds its gradients to those of earlier steps: "
                   "call zero_grad before each backward",
    "after": "this is the loss of the batch after the step: report the loss before it",
    "ahead": "these are the losses of batches that overlap, each one window further on: go on by a whole batch in each "
             "step"}


def first_step(updates: Sequence[Any], gradients: Any, rows: Sequence[Sequence[int]] = (),
               start: Any = None) -> float:
    """Every rank's step on a global batch must be the step along the mean gradient of its windows.

    `updates` has one (P,) per rank: (weights before - weights after) / learning rate of plain SGD. `gradients` (B, P)
    are those of the batch's windows, one by one; `rows`, a list per rank, says how many windows each forward got, which
    together must be the batch. `start` (P,) are the weights before the step. Returns the length of the step.
    """
    num_ranks, num_windows = len(updates), len(gradients)
    updates, gradients = all_finite(updates, "its first step"), flat(gradients).reshape(num_windows, -1)
    for rank, update in enumerate(updates):
        require(agree(update, updates[0], gradients), f"ranks 0 and {rank} make different first steps: when the "
                "optimizer steps, gradients must have been averaged (is finish() called before?)")
    found = Attribution(updates[0], gradients, 1 / num_windows, axes=("windows",), counts={"num_ranks": num_ranks})
    if not found.is_right():
        why = (_why_repeated(found, num_ranks) or _why_decayed(found, start) or _why_cut_off(found)
               or _why_no_step(found))
        raise CheckFailed(f"the first step on {counted(num_ranks, 'rank')} is not that of one process: "
                          + why)
    num_rows = sum(map(sum, rows))
    refuse(num_ranks == 1 and num_rows > num_windows, f"{num_rows} windows went through the model on 1 rank, but the "
           f"batch has {num_windows}: a step needs only one forward, whose loss you report")
    refuse(rows and num_rows != num_windows, f"{num_ranks} ranks put {num_rows} windows through the model, but the "
           f"batch has {num_windows}: each rank must take only its own share, and the gradients are averaged")
    return float(np.linalg.norm(updates[0]))


def global_losses(losses: Sequence[Sequence[float]], windows: Any, expected: Sequence[float],
                  slips: Mapping[str, Sequence[float]] = {}) -> float:
    """Every rank must report, for each step, the mean loss of the global batch.

    `losses` has a list per rank, `windows` (B,) are the losses of the first batch's windows one by one, `expected` is
    what one process reports, `slips` what it reports after a mistake, by the mistake's name in SLIPS, where a
    momentum's is followed by its value. Returns the last loss.
    """
    num_ranks, windows = len(losses), flat(windows)
    for rank, own in enumerate(losses):
        require(own is not None and len(own) == len(expected), f"rank {rank} reports {num_given(own)} losses for "
                f"{len(expected)} steps: return a list with one number for each step")
    losses = all_finite(losses, "the losses")
    rank, apart = furthest(losses)
    require(apart <= TOLERANCE, f"ranks 0 and {rank} report different losses: is each that of its own windows? The "
            "loss of the global batch takes an all-reduce, which gives it to every rank")
    step = parting(losses[0], expected, same_loss)
    if step is not None:
        got, want = float(losses[0][step]), expected[step]
        formula = Formula(expected, [(slipped, sentence.format(value=name.rpartition(" ")[2]))
                                     for name, slipped in slips.items() for kind, sentence in SLIPS.items()
                                     if name.startswith(kind)],
                          lambda one, other: parting(one, other, same_loss) is None)
        why = formula.explain(losses[0]) or _why_loss(step, got, want, windows, num_ranks)
        raise CheckFailed(f"on {counted(num_ranks, 'rank')} the loss of step {step} is {short(got)}, but in "
                          f"one process it is {short(want)}: {why}")
    return float(losses[0][-1])


def _why_repeated(found: Attribution, num_ranks: int) -> str:
    """The message if as many windows count twice as it takes to make the ranks' shares equal; "" otherwise."""
    weights, num_windows = found.factors, len(found.rows)
    if weights is None or weights.min() <= 0:
        return ""
    twice = np.isclose(weights, 2 * weights.min())
    if not 0 < twice.sum() == -num_windows % num_ranks or not np.allclose(weights[~twice], weights.min()):
        return ""
    return (f"windows {listed(np.flatnonzero(twice))} count twice: DistributedSampler repeats examples to make the "
            "ranks' shares equal")


def _why_decayed(found: Attribution, start: Any) -> str:
    """The message if the step is right except for a multiple of the weights that it started from; "" otherwise."""
    if start is None or found.got.shape != flat(start).shape:
        return ""
    off = found.got - found.wanted @ found.rows
    decay = times(off, start)
    if not np.allclose(off, decay * flat(start), rtol=0, atol=1e-3 * np.abs(off).max()):
        return ""
    return (f"{short(decay)} times the weights are added to the gradients: that is weight decay, which plain SGD does "
            "not have")


def _why_cut_off(found: Attribution) -> str:
    """The message if the mean gradient's numbers are cut off at the largest one of the step; "" otherwise."""
    mean, limit = found.wanted @ found.rows, float(np.abs(found.got).max())
    cut_off = np.clip(mean, -limit, limit)
    if found.got.shape != mean.shape or np.abs(mean).max() < 1.001 * limit or not agree(found.got, cut_off):
        return ""
    return f"no number is larger than {short(limit)}: do you clip gradients? Plain SGD uses them as they are"


def _why_no_step(found: Attribution) -> str:
    """The sentence for a step that is not along the mean gradient."""
    length = float(np.linalg.norm(found.got))
    limit = round(length, 2)  # clip_grad_norm_ adds 1e-6 to the length before it divides
    clipped = found.times is not None and found.times < 1 and np.isclose(length, limit, rtol=1e-5, atol=0)
    mistakes = {"clipped": found.wanted * found.times} if clipped and found.times else {}
    return found.explain(STEP, mistakes, length=short(limit))


def _why_loss(step: int, got: float, want: float, windows: np.ndarray, num_ranks: int) -> str:
    shares = [[windows[rank::num_ranks] for rank in range(num_ranks)], np.array_split(windows, num_ranks)]
    return likeliest(
        (np.isclose(got, want, rtol=SIX_DIGITS, atol=0), ROUNDED),
        (np.isclose(got, want * num_ranks), "it is summed over the ranks"),
        (any(np.isclose(got, np.mean([share.mean() for share in cut])) for cut in shares),
         "it is the mean of the ranks' means, but their shares are not equal: weight each mean by its number of "
         "windows"),
        (step == 2, "the first step is right but the second is not. Do gradients of the first go into it (zero_grad, "
         f"finish)? Does the optimizer have momentum, or a learning rate that changes? {PLAIN}"),
        (step, "the earlier steps are right. Does a step start with the gradients or windows of another (zero_grad, "
         "finish)?"),
        (True, "is it the mean over all windows of the global batch, before the step is made?"))
