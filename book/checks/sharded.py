"""L3: steps of training with sharded state, against those of one process: who updates what, and with which gradient.

A rank's steps come as a list with, for each, `loss`; `updates`, what its optimizer was given, unit -> (shard, its
gradient) as they were just before the update; `num_foreign`, how many numbers it had besides; `weights`, the model's
parameters after the step. One process's have `loss`, `before` and `after`, its weights, and `parts`, the gradients of
each part of the batch, rank by rank and, within a rank, backward by backward.

How a unit is cut is left to the learner: which numbers are in a shard is found by their values, of which no two are
alike.
"""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from book.checks.compare import (
    TOLERANCE, Gradients, State, agree, flat, is_own, is_zero, magnitude, multiples, times, whole,
)
from book.checks.verdict import CheckFailed, finite, listed, number, short

Updates = Mapping[str, tuple[Any, Any]]
TENSOR_ATTRIBUTES = ("flatten", "view", "reshape", "ravel", "detach", "numel")  # what packs a p.grad asks it for
Places = dict[str, np.ndarray]  # of each unit's shard, by number: where it is in the whole model, -1 for padding


class Step(Protocol):
    """A step on one rank."""

    loss: float
    updates: Updates
    num_foreign: int
    weights: State


class Whole(Protocol):
    """The same step in one process."""

    loss: float
    before: State
    after: State
    parts: Sequence[Gradients]


def sharded_training(ranks: Sequence[Sequence[Step]], expected: Sequence[Whole], units: Mapping[str, State]) -> float:
    """Every step of every rank must be that of one process: places, loss, gradients, weights.

    `units` has each unit's parameters, by name. Returns the sum of the absolute values of the weights at the end.
    Raises CheckFailed with the likeliest reason for the first thing that is wrong.
    """
    _check_optimizers(ranks)
    places = [_places(rank, own[0].updates, expected[0].before, len(ranks), units) for rank, own in enumerate(ranks)]
    _check_shares(places, units, whole(expected[0].before).size)
    for k, want in enumerate(expected):
        steps = [own[k] for own in ranks]
        _check_loss(k, [step.loss for step in steps], want.loss)
        _check_gradients(k, steps, places, want, expected[k - 1] if k else None)
        _check_weights(k, steps, places, want)
    return magnitude(whole(expected[-1].after))


def _check_optimizers(ranks: Sequence[Sequence[Step]]) -> None:
    for rank, own in enumerate(ranks):
        for step in own:
            if not step.updates:
                raise CheckFailed(f"rank {rank}'s optimizer makes no step: step() has to call self.optimizer.step()")
            if step.num_foreign:
                raise CheckFailed(f"rank {rank}'s optimizer has {step.num_foreign} numbers that are in no unit's "
                                  "shard, and keeps state for each: hand it the shards alone")


def training_hint(message: str) -> str | None:
    """What it means that a training failed on a rank with `message`; None where nothing is known of it."""
    if "storage of size 0" in message:
        return ("Something is used while its unit is freed: which unit's all_gather has to come before, in which hook? "
                "In backward a block computes with its weights again")
    if any(f"'NoneType' object has no attribute '{name}'" in message for name in TENSOR_ATTRIBUTES):
        return ("A p.grad was None: reduce_scatter ran before all gradients of the unit were there, or a second time. "
                "It is called once in each backward, by the last of the unit's gradients")
    return None


# Who has what

def _places(rank: int, updates: Updates, before: State, num_ranks: int, units: Mapping[str, State]) -> Places:
    """Where in the model each number of a rank's shards is: rank 0's model, which all ranks must start from."""
    model, found = whole(before), {}
    for unit, (shard, _) in updates.items():
        values = flat(shard)
        places = _nearest(model, values)
        strange = (places < 0) & (values != 0)
        if strange.any():
            raise CheckFailed(f"rank {rank}'s shard of {unit} starts with numbers that rank 0's parameters don't have, "
                              f"{strange.sum()} of {values.size}: before a unit is cut, all ranks need rank 0's values "
                              "(dist.broadcast with src=0)")
        size = whole(units[unit]).size
        if values.size > -(-size // num_ranks) + len(units[unit]):
            raise CheckFailed(f"rank {rank}'s shard of {unit} has {values.size} numbers of its {size}: a share of "
                              f"{num_ranks} is {-(-size // num_ranks)}")
        found[unit] = places
    return found


def _nearest(model: np.ndarray, values: np.ndarray) -> np.ndarray:
    """For each value where in `model` it is, -1 where it is not there."""
    order = np.argsort(model)
    after = np.searchsorted(model[order], values).clip(1, model.size - 1)
    after -= np.abs(model[order[after - 1]] - values) <= np.abs(model[order[after]] - values)
    return np.where(np.abs(model[order[after]] - values) <= TOLERANCE, order[after], -1)


def _check_shares(places: Sequence[Places], units: Mapping[str, State], size: int) -> None:
    """Every number must be in one rank's shard."""
    for unit, parameters in units.items():
        owned = np.concatenate([own[unit] for own in places])
        owned = owned[owned >= 0]
        several, num = owned.size - np.unique(owned).size, whole(parameters).size
        if several:
            raise CheckFailed(f"{several} numbers of {unit} are in the shards of two ranks: rank r's shard is the r-th "
                              "of N pieces")
        if owned.size < num:
            raise CheckFailed(f"{num - owned.size} of the {num} numbers of {unit} are in nobody's shard: {len(places)} "
                              "ranks can't share them equally, so fill up with zeros, then cut")


# A step

def _check_loss(k: int, losses: Sequence[float], want: float) -> None:
    for rank, loss in enumerate(losses):
        finite(rank, f"the loss of step {k}", np.asarray(loss, dtype=float))
    why = ("have all ranks started from rank 0's weights, in the tensors that the model computes with, and are these "
           "whole and in their places when a forward runs?")
    number(f"the mean of the ranks' losses in step {k}", float(np.mean(losses)), want, [(losses[0], why)])


def _check_gradients(k: int, steps: Sequence[Step], places: Sequence[Places], want: Whole,
                     previous: Whole | None) -> None:
    """Each shard's gradient must be its part of the mean over the ranks."""
    rows = np.stack([whole(part) for part in want.parts])
    last = None if previous is None else np.mean([whole(part) for part in previous.parts], axis=0)
    for rank, step in enumerate(steps):
        for unit, (_, gradient) in step.updates.items():
            where = f"step {k}, rank {rank}, {unit}"
            if gradient is None:
                raise CheckFailed(f"{where}: the shard has no gradient when the optimizer steps. Is reduce_scatter "
                                  "called for each unit before, and does it set self.shard.grad?"
                                  + (" Does your count start again for each backward?" if k else ""))
            here, got = places[rank][unit] >= 0, finite(rank, f"the gradient of {unit}'s shard", flat(gradient))
            index = places[rank][unit][here]
            if np.any(got[~here]):
                raise CheckFailed(f"{where}: the zeros that fill the shard up have a gradient: are the gradients cut "
                                  "as the parameters are, in the same order, and filled up with zeros?")
            if not agree(got[here], rows.mean(axis=0)[index], rows):
                raise CheckFailed(f"{where}: " + _why_gradient(rank, got[here], rows[:, index], len(steps),
                                                               None if last is None else last[index]))


def _why_gradient(rank: int, got: np.ndarray, rows: np.ndarray, num_ranks: int, previous: np.ndarray | None) -> str:
    """What the gradient of a shard is in place of the mean of `rows`, one for each backward of each rank."""
    mean, num_backwards = rows.mean(axis=0), len(rows) // num_ranks
    if previous is not None and agree(got, mean + previous, rows):
        return "the gradient of the step before is still in it: who clears the shard's gradient after the update?"
    if np.isclose(factor := times(got, mean), num_ranks) and agree(got, factor * mean, rows):
        return f"it is the sum over {num_ranks} ranks; the loss of the whole batch is a mean, so divide by {num_ranks}"
    factors = multiples(rows, got)
    if factors is None:
        return ("it is no sum of the ranks' gradients at these places. Are the gradients packed in the order of the "
                "parameters, and is this rank's own piece taken?")
    by_rank = factors.reshape(num_ranks, num_backwards)
    if is_zero(by_rank[:, :-1]).all() and num_backwards > 1:
        return (f"only the last of the step's {num_backwards} backwards is in it: a second reduce_scatter has to add "
                "to self.shard.grad what it brings, as backward does to p.grad")
    shares = by_rank.mean(axis=1) * num_backwards
    if is_own(shares, rank) or (is_zero(np.delete(shares, rank)).all()):
        return "only this rank's own gradient is in it: nothing has come from the other ranks"
    if is_zero(factors).any():
        return f"the gradients of ranks {listed(np.flatnonzero(is_zero(shares)))} have no part in it"
    if np.allclose(factors, factors[0]):
        return f"it is {short(factors[0] * len(rows))} times the mean: what is divided twice, or not at all?"
    return (f"the {num_backwards} backwards of each rank weigh {listed(map(short, by_rank[0]))}, and should "
            f"{short(1 / len(rows))}: is what one backward brought added once, and averaged once?")


def _check_weights(k: int, steps: Sequence[Step], places: Sequence[Places], want: Whole) -> None:
    before, after = whole(want.before), whole(want.after)
    for rank, step in enumerate(steps):
        got = finite(rank, f"its parameters after step {k}", whole({name: step.weights[name] for name in want.after}))
        wrong = np.abs(got - after) > TOLERANCE * max(1, np.abs(after).max())
        if wrong.any():
            own = np.zeros(got.size, dtype=bool)
            own[np.concatenate([p[p >= 0] for p in places[rank].values()])] = True
            raise CheckFailed(f"after step {k} rank {rank} has {wrong.sum()} wrong numbers of {wrong.size}: "
                              + _why_weights(got, before, after, own, wrong))


class _Kind(NamedTuple):
    holds: bool
    message: str


def _why_weights(got: np.ndarray, before: np.ndarray, after: np.ndarray, own: np.ndarray, wrong: np.ndarray) -> str:
    stale = np.abs(got - before) <= TOLERANCE
    kinds = (
        _Kind(stale.all(), "all parameters are as before the step. The update went into the shard; all_gather has to "
                           "bring the shards into the memory that the parameters are views of, and into no copy"),
        _Kind(stale[~own].all() and not wrong[own].any(),
              "its own shard is updated, and the rest is as before the step: after the update all ranks' shards have "
              "to be gathered"),
        _Kind(not got[wrong].any(), "zeros stand there: have the parameters' numbers been brought back, and is the "
                                    "padding left out?"),
        _Kind(bool((_nearest(np.append(after, 0), got) >= 0).all()),
              "they are right numbers in wrong places. What all_gather brings is in the order of ranks, and the "
              "padding stands at its end and belongs to no parameter"))
    for kind in kinds:
        if kind.holds:
            return kind.message
    return "the gradients were right, so what has changed them besides one step of the optimizer on the shard?"
