"""L3, lab 5: which masks ranks draw: the same where they hold an activation alike, others where they share it out."""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations, product
from typing import Any

import numpy as np

from book.checks.compare import dense, held, identical
from book.checks.verdict import CheckFailed, require

MANY = 5.0  # standard deviations: fair coins are further from their mean once in two million
Run = Mapping[str, Sequence[Any]]


def dropout_masks(runs: Sequence[Run], other_seed: Sequence[Run], shape: Sequence[int], dropout: float) -> float:
    """What ranks make of ones in this `shape`: `alike` the same on all, `apart` on each by itself, at each call anew.

    A run has lists `alike` and `apart` of what the calls gave, and `gradients` of what `alike` was given. The last call
    of `alike` comes after one of `apart` that drew more numbers on some ranks. `other_seed` are runs with another seed.
    Returns what a kept one has become, 1 / (1 - dropout) as rank 0 made it.
    """
    for rank, run in enumerate(runs):
        for kind in ("alike", "apart"):
            for call, output in enumerate(run[kind]):
                got = held(rank, f"what {kind} gives", output, shape)
                _check_scaled(f"{kind}, call {call}, rank {rank}", got, dropout)
    _check_alike([run["alike"] for run in runs])
    _check_apart([run["apart"] for run in runs])
    for rank, run in enumerate(runs):
        _check_anew(rank, run)
        for output, gradient in zip(run["alike"], run["gradients"]):
            require(gradient is not None and identical(output, gradient), f"rank {rank}: what is dropped forward must "
                    "get the gradient 0, and what is kept the same factor: multiply x by the mask, inside autograd")
    for rank, (run, other) in enumerate(zip(runs, other_seed)):
        for kind in ("alike", "apart"):
            require(not identical(run[kind][0], other[kind][0]), f"rank {rank}: two seeds give the same masks in "
                    f"{kind}: its generator has to start from the seed")
    return float(dense(runs[0]["alike"][0]).max())


def _check_scaled(where: str, output: np.ndarray, dropout: float) -> None:
    """Kept ones must have become 1 / (1 - dropout), and about the right share be dropped."""
    kept, dropped, right = output[output != 0], (output == 0).mean(), 1 / (1 - dropout)
    spread = np.sqrt(dropout * (1 - dropout) / output.size)
    require(0 < dropped < 1, f"{where}: {'nothing' if len(kept) else 'everything'} is dropped")
    require(not any(np.isin((output == 0).mean(axis=axis), (0, 1)).all() for axis in range(output.ndim)),
            f"{where}: whole rows are dropped or kept: draw a number for each element")
    require(abs(dropped - dropout) <= MANY * spread,
            f"{where}: {dropped:.0%} are dropped, {dropout:.0%} are meant to be: p is the probability to drop")
    require(np.allclose(kept, right), f"{where}: a kept 1 becomes {kept[0]:.4g}, it should be {right:.4g}: divide by "
            "the probability to keep, and the mean stays what it was")


def _check_alike(ranks: Sequence[Sequence[Any]]) -> None:
    for call, outputs in enumerate(zip(*ranks)):
        for rank in (rank for rank, output in enumerate(outputs) if not identical(output, outputs[0])):
            require(call < len(ranks[0]) - 1, f"ranks 0 and {rank} drew the same masks until one of them drew more "
                    "numbers for an activation of its own: draw the two kinds of masks from two generators")
            raise CheckFailed(f"call {call} of alike: ranks 0 and {rank} drop other elements of an activation that "
                              "they hold alike, and from here on they hold different ones: all ranks need one seed")


def _check_apart(ranks: Sequence[Sequence[Any]]) -> None:
    for (first, one), (second, other) in combinations(enumerate(ranks), 2):
        for call, (a, b) in enumerate(zip(one, other)):
            require(not identical(a, b), f"call {call} of apart: ranks {first} and {second} draw the same mask for "
                    "different units, which one process would draw independently: a unit of one rank is dropped "
                    "whenever its namesake is; let the seed depend on the rank")
        for (call, a), (later, b) in product(enumerate(one), enumerate(other)):
            require(not identical(a, b), f"rank {first}'s call {call} of apart draws the mask of rank {second}'s call "
                    f"{later}: ranks that skip some numbers of one generator meet in later calls; give each rank a "
                    "generator with a seed of its own")


def _check_anew(rank: int, run: Run) -> None:
    """No two masks of a rank may be the same."""
    masks = [(kind, call, output) for kind in ("alike", "apart") for call, output in enumerate(run[kind])]
    for (kind, call, a), (other, later, b) in combinations(masks, 2):
        same = identical(a, b)
        require(not same or kind != other, f"rank {rank}: calls {call} and {later} of {kind} drop the same elements: a "
                "generator is seeded once, when it is made, and goes on from there")
        require(not same, f"rank {rank}: alike and apart draw the same masks: their generators start from the same "
                "seed on this rank, so one step apart's seed from alike's (seed + 1 + rank)")
