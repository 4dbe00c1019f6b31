"""L3: data-parallel training: the state that all ranks start from, the global batch, the epochs.

States come as one dict per rank, name -> tensor or array.
"""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from book.checks.compare import (
    SIX_DIGITS, TOLERANCE, State, agree, differing, first_wrong, flat, furthest, identical, is_zero, magnitude,
    multiples, num_given,
)
from book.checks.verdict import CheckFailed, finite, listed, short


def same_state(before: Sequence[State], after: Sequence[State], parameters: Sequence[str]) -> float:
    """Every rank must hold what rank 0 held before, parameters and buffers alike.

    `parameters` says which of the names are parameters. Returns the sum of absolute values of that state. Raises
    CheckFailed naming a tensor and what it holds instead.
    """
    for name in differing(before[0], after[0]):
        raise CheckFailed(_why_root_changed(name, before, after[0][name]))
    wrong = [(rank, name) for rank in range(1, len(before)) for name in differing(before[0], after[rank])]
    if wrong:
        raise CheckFailed(_why_not_rank_0(wrong, before, after, parameters))
    return sum(map(magnitude, before[0].values()))


def trained_alike(starts: Sequence[Any], ends: Sequence[Any], expected: Any) -> float:
    """All ranks must end with `expected`, what one process gets that starts with rank 0's weights.

    Weights come as one flat tensor per rank. Returns the sum of their absolute values at the end.
    """
    starts, ends = _finite(starts, "the weights at the start"), _finite(ends, "the weights at the end")
    expected = flat(expected)
    for rank, end in enumerate(ends):
        if end.shape != expected.shape:
            raise CheckFailed(f"rank {rank} ends with {end.size} weights, one process with {expected.size}")
    rank, apart = furthest(ends)
    if not apart <= TOLERANCE:
        kept = np.allclose(ends[rank] - ends[0], starts[rank] - starts[0], rtol=1e-6)
        why = ("that is by as much as before the first step. Averaged gradients move all ranks alike, but nothing has "
               "brought them together" if kept else "their gradients differ too: are they averaged in every step?")
        raise CheckFailed(f"ranks 0 and {rank} end with different weights: {why}")
    if not agree(ends[0], expected):
        raise CheckFailed("the ranks end with the same weights, but not with those of one process that starts from "
                          "rank 0's and trains on the whole batches: hand rank 0's out before the first step, and "
                          "average gradients in every step. Is it the same optimizer, with the same learning rate, and "
                          "are gradients cleared before each step?")
    return magnitude(expected)


def first_step(updates: Sequence[Any], gradients: Any, rows: Sequence[Sequence[int]] = ()) -> float:
    """Every rank's step on a global batch must be the step along the mean gradient of its windows.

    `updates` has one (P,) per rank: (weights before - weights after) / learning rate of plain SGD. `gradients` (B, P)
    are those of the batch's windows, one by one; `rows`, a list per rank, says how many windows each forward got, which
    together must be the batch. Returns the length of the step. Raises CheckFailed with the likeliest reason.
    """
    num_ranks, num_windows = len(updates), len(gradients)
    updates, gradients = _finite(updates, "its first step"), flat(gradients).reshape(num_windows, -1)
    for rank, update in enumerate(updates):
        if not agree(update, updates[0], gradients):
            raise CheckFailed(f"ranks 0 and {rank} make different first steps: when the optimizer steps, gradients "
                              "must have been averaged (is finish() called before?)")
    if not agree(updates[0], mean := gradients.mean(axis=0), gradients):
        if agree(updates[0], mean, gradients, tolerance=SIX_DIGITS):
            raise CheckFailed("the first step is right to six digits only: have the weights or the gradients been "
                              "float32 on the way?")
        raise CheckFailed(f"the first step on {num_ranks} rank{'s' * (num_ranks > 1)} is not that of one process: "
                          + _why_step(multiples(gradients, updates[0]), num_ranks))
    num_rows = sum(map(sum, rows))
    if rows and num_rows != num_windows:
        raise CheckFailed(f"{num_ranks} ranks put {num_rows} windows through the model, the batch has {num_windows}: "
                          "each rank takes its own share, and the gradients are averaged")
    return float(np.linalg.norm(updates[0]))


def global_losses(losses: Sequence[Sequence[float]], windows: Any, expected: Sequence[float]) -> float:
    """Every rank must report, for each step, the mean loss of the global batch.

    `losses` has a list per rank, `windows` (B,) are the losses of the first batch's windows one by one, `expected` is
    what one process reports. Returns the last loss. Raises CheckFailed with the likeliest reason.
    """
    num_ranks, windows = len(losses), flat(windows)
    for rank, own in enumerate(losses):
        if own is None or len(own) != len(expected):
            raise CheckFailed(f"rank {rank} reports {num_given(own)} losses for {len(expected)} steps: "
                              "return a list with one number for each step")
    losses = _finite(losses, "the losses")
    rank, apart = furthest(losses)
    if not apart <= TOLERANCE:
        raise CheckFailed(f"ranks 0 and {rank} report different losses: each reports that of its own "
                          "windows; the loss of the global batch takes an all-reduce")
    step = first_wrong(losses[0], expected)
    if step is not None:
        raise CheckFailed(_why_loss(step, float(losses[0][step]), expected, windows, num_ranks))
    return float(losses[0][-1])


def epochs(orders: Sequence[Sequence[Sequence[int]]], num_examples: int, num_epochs: int) -> list[int]:
    """Each epoch must show every example once, on one of the ranks, in another order than the epochs before.

    `orders[rank][epoch]` lists the examples that a rank gets. Returns rank 0's first example of every epoch.
    """
    for rank, own in enumerate(orders):
        if own is None or len(own) != num_epochs:
            raise CheckFailed(f"rank {rank} has {num_given(own)} epochs, {num_epochs} are meant to come: "
                              "return one list of examples for each")
    for epoch, shares in enumerate(zip(*orders)):
        _check_shares(epoch, shares, num_examples)
        for earlier in range(epoch):
            if [list(own[earlier]) for own in orders] == [list(own[epoch]) for own in orders]:
                raise CheckFailed(f"epoch {epoch} has the order of epoch {earlier}: DistributedSampler shuffles by its "
                                  "seed plus the epoch, and the epoch is 0 until set_epoch tells it otherwise, before "
                                  "the epoch begins")
    if any(all(list(share) == sorted(share) for share in shares) for shares in zip(*orders)):
        raise CheckFailed("an epoch comes in the order of the data set: it should be shuffled")
    return [int(own[0]) for own in orders[0]]


def _finite(arrays: Sequence[Any], name: str) -> list[np.ndarray]:
    """What each rank holds as `name`, as flat arrays."""
    return [finite(rank, name, flat(array)) for rank, array in enumerate(arrays)]


def _check_shares(epoch: int, shares: Sequence[Sequence[int]], num_examples: int) -> None:
    """The ranks' shares of one epoch must hold each example once."""
    for rank, share in enumerate(shares):
        if not len(share):
            raise CheckFailed(f"rank {rank} gets no example in epoch {epoch}")
        if min(share) < 0 or max(share) >= num_examples:
            raise CheckFailed(f"rank {rank} gets example {min(share) if min(share) < 0 else max(share)} in epoch "
                              f"{epoch}: there are 0 to {num_examples - 1}")
    seen = np.bincount(np.concatenate([np.asarray(share, dtype=int) for share in shares]), minlength=num_examples)
    absent = np.flatnonzero(seen == 0)
    if len(shares) > 1 and all(len(set(share)) == num_examples for share in shares):
        raise CheckFailed(f"in epoch {epoch} each rank takes all {num_examples} examples: the sampler cuts them into "
                          "num_replicas shares and takes that of rank; both are those of the group")
    if seen.max() == 1 and len(absent):
        raise CheckFailed(f"in epoch {epoch} example {listed(absent)} of 0 to {num_examples - 1} is left out "
                          "on every rank, and none comes twice: is a share cut short (drop_last, a slice)?")
    if seen.max() > 1:
        raise CheckFailed(f"in epoch {epoch} example {seen.argmax()} comes {seen.max()} times and {len(absent)} of "
                          f"{num_examples} not at all: all ranks must cut the same permutation, so seed and epoch "
                          "must be the same on all")


def _why_root_changed(name: str, before: Sequence[State], got: Any) -> str:
    held = [flat(state[name]) for state in before]
    if np.allclose(flat(got), np.mean(held, axis=0)):
        return f"rank 0's {name} is now the mean over ranks: broadcast hands out rank 0's, nothing is averaged"
    for rank, other in enumerate(held):
        if identical(got, other):
            return f"rank 0's {name} is now what rank {rank} had: the source must be rank 0 (src=0)"
    return f"rank 0's {name} has changed: rank 0 keeps what it has, and the others get that"


def _why_not_rank_0(wrong: Sequence[tuple[int, str]], before: Sequence[State], after: Sequence[State],
                    parameters: Sequence[str]) -> str:
    differ = [(rank, name) for rank in range(1, len(before)) for name in differing(before[0], before[rank])]
    kept = [(rank, name) for rank, name in wrong if identical(after[rank][name], before[rank][name])]
    rank, name = (kept or wrong)[0]
    buffers = [name for name in before[0] if name not in parameters]
    if kept == differ:
        return ("every tensor is as it was: broadcast into the module's own tensors, or copy_() into them; a copy or a "
                "new parameter is not what an optimizer made before this holds")
    if kept and {name for _, name in kept} == {name for _, name in differ if name in buffers}:
        return f"the buffers are still each rank's own, for example {name}: a state is more than its parameters"
    if kept and {name for _, name in kept} == {name for _, name in differ if name in parameters}:
        return (f"the buffers are rank 0's, but the parameters that the module had, for example {name}, are still each "
                "rank's own: have you put new ones in their place? An optimizer made before this holds the old ones")
    if kept:
        return (f"rank {rank} still has its own {name}: not all of the module's parameters and buffers are sent, "
                "or not waited for")
    return f"rank {rank}'s {name} is neither its own nor rank 0's: do all ranks send their tensors in the same order?"


def _why_step(weights: np.ndarray | None, num_ranks: int) -> str:
    if weights is None:
        return ("it is no sum of the gradients of the batch's windows: which windows does it use, and which optimizer? "
                "Do all ranks start from rank 0's weights?")
    share = 1 / len(weights)
    twice = np.isclose(weights, 2 * weights.min())
    if 0 < twice.sum() == -len(weights) % num_ranks and np.allclose(weights[~twice], weights.min()):
        return (f"windows {listed(np.flatnonzero(twice))} count twice: a DistributedSampler repeats "
                "examples to make the ranks' shares equal")
    if np.allclose(weights, weights[0]):
        times = weights[0] / share
        if np.isclose(times, num_ranks):
            return (f"it is {num_ranks} times as long. The global batch is the same, so the learning rate is too, and "
                    "gradients are averaged, not summed")
        return f"it is {short(times)} times as long: what is divided twice, or multiplied?"
    absent = np.flatnonzero(is_zero(weights))
    if len(absent):
        return (f"window {listed(absent)} of the batch's {len(weights)} has no part in it: each rank "
                "takes windows of its own, and none is left out")
    return (f"a window weighs between {short(weights.min())} and {short(weights.max())}, each should weigh "
            f"{short(share)}: the ranks' shares are not equal, so weigh each rank's mean by its number of windows")


def _why_loss(step: int, got: float, expected: Sequence[float], windows: np.ndarray, num_ranks: int) -> str:
    shown = f"on {num_ranks} rank{'s' * (num_ranks > 1)} the loss of step {step} is {short(got)}, of one process "
    shown += f"{short(expected[step])}: "
    shares = [[windows[rank::num_ranks] for rank in range(num_ranks)], np.array_split(windows, num_ranks)]
    if np.isclose(got, expected[step] * num_ranks):
        return shown + "it is summed over the ranks"
    if any(np.isclose(got, np.mean([share.mean() for share in cut])) for cut in shares):
        return shown + ("it is the mean of the ranks' means, and their shares are not equal: weigh each by its number "
                        "of windows")
    if step:
        return shown + ("the steps before are right. Does a step begin with the gradients or windows of another "
                        "(zero_grad, finish)?")
    return shown + "is it the mean over all windows of the global batch, before the step is made?"
