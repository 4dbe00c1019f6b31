"""L3, lab 4: steps with sharded state against those of one process, and checkpoints of it.

A rank's steps come as a list. Each has `loss`; `updates`, what its optimizer was given, unit -> (shard, its gradient)
just before the update; `num_foreign`, how many other numbers the optimizer had; `weights`, the model's parameters after
the step. A step of one process has `loss`, its weights `before` and `after`, and `parts`, the gradients of each part of
the batch, rank by rank and, within a rank, backward by backward.

How a unit is cut is left to the learner: which numbers are in a shard is found by their values, which are all
different.
"""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from book.checks.attribution import Attribution, in_words
from book.launch import LaunchError
from book.checks.formula import Formula
from book.checks.verdict import (
    TOLERANCE, CheckFailed, Gradients, StateDict, agree, differing, finite, flat, likeliest, magnitude,
    refuse, require, whole, with_hint,
)
from book.words import counted

Updates = Mapping[str, tuple[Any, Any]]
Places = dict[str, np.ndarray]  # where each number of each unit's shard is in the whole model, -1 for padding

GRADIENT = {  # a shard's gradient, which should be its part of the mean over ranks and backwards
    "times num_ranks": "it is the sum over {num_ranks} ranks, but the loss of the whole batch is a mean: divide by "
                       "{num_ranks}",
    "only last backwards": "only the last of the step's {num_backwards} backwards is in it: a second reduce_scatter "
                           "must add its result to self.shard.grad, as backward does to p.grad",
    "only own": "only this rank's own gradient is in it, nothing from the other ranks",
    "missing ranks": "the gradients of ranks {absent} have no part in it",
    "missing backwards": "of each rank's {num_backwards} backwards, counted from 0, number {absent} has no part in it: "
                         "scatter in every backward, and add. If hooks count gradients, their count begins again when "
                         "the unit is done, not in step()",
    "scaled": "it is {times} times the mean: what do you divide twice, or not at all?",
    "unequal": "the {num_backwards} backwards of each rank weigh {of_rank_0}, but should weigh {share}: is the result "
               "of each backward added once, and averaged once?",
    "unknown": "it is not a sum of the ranks' gradients at these places. Do you pack the gradients in the order of the "
               "parameters, and take this rank's own piece?"}
LATE = ("Or do all hooks work on the last unit? A lambda looks up `unit` when it is called, after the loop: bind it "
        "with lambda *_, unit=unit: ...")
NO_GRADIENT = ("A p.grad was None: reduce_scatter ran before all gradients of the unit were there, or a second time. "
               "Call it once in each backward, when the last of the unit's gradients is there. " + LATE)
TRAINING_ERRORS = {
    "storage of size 0": "Something is used while its unit is freed: which unit must be gathered before that, and in "
                         "which hook? A block uses its weights again in backward. " + LATE,
    "out of bounds for storage of size": "a storage's resize_ takes bytes, and you gave it fewer than the tensor "
                                         "needs: flat.nbytes, which is numel() times element_size()",
    **{f"'NoneType' object has no attribute '{name}'": NO_GRADIENT  # what code that packs a p.grad asks it for
       for name in ("flatten", "view", "reshape", "ravel", "detach", "numel")}}
SAVE_ERRORS = {  # what DCP says when the parts of a checkpoint don't fit together, and what it means here
    "invalid fill tensor-volume": "the parts that were handed over under a name don't fill its tensor. DCP puts "
                                  "together what has the same name, so all ranks must use the same name for their "
                                  "parts of a tensor, and each must hand over its own"}
LOAD_ERRORS = {  # what DCP says when a checkpoint lacks what is asked for, and what it means here
    "Size mismatch": "a tensor's length differs from when it was saved. Did you save the zeros that pad a shard, "
                     "or only the shard? Its global shape must be the unit's, which does not depend on the number of "
                     "ranks",
    "Missing key": "a name that is asked for was not saved: names must not depend on the rank or the number of ranks, "
                   "and save and load must use the same dict",
    "KeyError: 'step'": "a new optimizer has no state yet: call start_state first",
    "exp_avg": "an optimizer that has made no step has no state to load into: call start_state(zero) first"}


class RankStep(Protocol):
    """A step on one rank."""

    loss: float
    updates: Updates
    num_foreign: int
    weights: StateDict


class WholeStep(Protocol):
    """The same step in one process."""

    loss: float
    before: StateDict
    after: StateDict
    parts: Sequence[Gradients]


# Training

def sharded_training(ranks: Sequence[Sequence[RankStep]], expected: Sequence[WholeStep],
                     units: Mapping[str, StateDict]) -> float:
    """Every step of every rank must be that of one process: places, loss, gradients, weights.

    `units` has each unit's parameters, by name. Returns the sum of the absolute values of the weights at the end.
    """
    for rank, step in ((rank, step) for rank, own in enumerate(ranks) for step in own):
        require(step.updates, f"rank {rank}'s optimizer makes no step: step() must call self.optimizer.step()")
        refuse(step.num_foreign, f"rank {rank}'s optimizer has {step.num_foreign} numbers that are in no unit's shard, "
               "and keeps state for each: give it only the shards")
    places = [_places(rank, own[0].updates, expected[0].before, len(ranks), units) for rank, own in enumerate(ranks)]
    _check_shares(places, units)
    for k, want in enumerate(expected):
        steps = [own[k] for own in ranks]
        _check_loss(k, [step.loss for step in steps], want.loss)
        _check_gradients(k, steps, places, want, expected[k - 1] if k else None)
        _check_weights(k, steps, places, want)
    return magnitude(whole(expected[-1].after))


def training_failure(error: LaunchError) -> str:
    """An error of a rank that trains, with a hint if sharding often ends in it."""
    return with_hint(error, TRAINING_ERRORS)


def _places(rank: int, updates: Updates, before: StateDict, num_ranks: int, units: Mapping[str, StateDict]) -> Places:
    """Where each number of a rank's shards is in rank 0's model, from which all ranks must start."""
    model, found = whole(before), {}
    for unit, (shard, _) in updates.items():
        values, size = flat(shard), whole(units[unit]).size
        found[unit] = _nearest(model, values)
        strange = (found[unit] < 0) & (values != 0)
        refuse(strange.any(), f"before the first step, {strange.sum()} of the {values.size} numbers in rank {rank}'s "
               f"shard of {unit} are not among rank 0's parameters: give all ranks rank 0's values (dist.broadcast "
               "with src=0) before you cut a unit")
        share = -(-size // num_ranks)
        require(values.size <= share + len(units[unit]),
                f"rank {rank}'s shard of {unit} has {values.size} of its {size} numbers, but a share on {num_ranks} "
                f"ranks is {share}")
    return found


def _nearest(model: np.ndarray, values: np.ndarray) -> np.ndarray:
    """The place of each value in `model`, -1 if it is not there."""
    order = np.argsort(model)
    after = np.searchsorted(model[order], values).clip(1, model.size - 1)
    after -= np.abs(model[order[after - 1]] - values) <= np.abs(model[order[after]] - values)
    return np.where(np.abs(model[order[after]] - values) <= TOLERANCE, order[after], -1)


def _check_shares(places: Sequence[Places], units: Mapping[str, StateDict]) -> None:
    """Every number must be in one rank's shard."""
    for unit, parameters in units.items():
        owned = np.concatenate([own[unit] for own in places])
        owned = owned[owned >= 0]
        several, num = owned.size - np.unique(owned).size, whole(parameters).size
        refuse(several, f"{several} numbers of {unit} are in the shards of two ranks, but rank r's shard must be the "
               "r-th of N pieces")
        hint = (f"{len(places)} ranks can't share them equally, so pad with zeros before you cut" if num % len(places)
                else f"each of {len(places)} ranks keeps {num // len(places)} of them, one after the other")
        require(owned.size == num,
                f"{num - owned.size} of the {num} numbers of {unit} are in nobody's shard: {hint}")


def _check_loss(k: int, losses: Sequence[float], want: float) -> None:
    for rank, loss in enumerate(losses):
        finite(rank, f"the loss of step {k}", np.asarray(loss, dtype=float))
    why = ("did all ranks start from rank 0's weights, in the tensors that the model computes with, and are these "
           "whole and in place when a forward runs?")
    formula = Formula(want, [(losses[0], why)])
    formula.require_right(f"the mean of the ranks' losses in step {k}", float(np.mean(losses)))


def _check_gradients(k: int, steps: Sequence[RankStep], places: Sequence[Places], want: WholeStep,
                     previous: WholeStep | None) -> None:
    """Each shard's gradient must be its part of the mean over the ranks."""
    rows = np.stack([whole(part) for part in want.parts])
    last = None if previous is None else np.mean([whole(part) for part in previous.parts], axis=0)
    for rank, step in enumerate(steps):
        for unit, (_, gradient) in step.updates.items():
            where = f"step {k}, rank {rank}, {unit}"
            require(gradient is not None, f"{where}: the shard has no gradient when the optimizer steps. Is "
                    "reduce_scatter called for each unit before that, does it set self.shard.grad, and is that cleared "
                    "only after the update?"
                    + " Does your count start again for each backward?" * (k > 0))
            here, got = places[rank][unit] >= 0, finite(rank, f"the gradient of {unit}'s shard", flat(gradient))
            index = places[rank][unit][here]
            refuse(got[~here].any(), f"{where}: the zeros that pad the shard have a gradient: are the gradients packed "
                   "like the parameters, in the same order, and padded with zeros?")
            if not agree(got[here], rows.mean(axis=0)[index], rows):
                why = _why_gradient(rank, got[here], rows[:, index], len(steps), None if last is None else last[index])
                raise CheckFailed(f"{where}: {why}")


def _why_gradient(rank: int, got: np.ndarray, rows: np.ndarray, num_ranks: int, previous: np.ndarray | None) -> str:
    """What a shard's gradient is instead of the mean of `rows`, one for each backward of each rank."""
    if previous is not None and agree(got, rows.mean(axis=0) + previous, rows):
        return "it still contains the gradient of the step before: clear the shard's gradient after the update"
    found = Attribution(got, rows.reshape(num_ranks, -1, rows.shape[1]), 1 / len(rows), rank, ("ranks", "backwards"),
                        {"num_ranks": num_ranks})
    of_rank_0 = "" if found.factors is None else in_words(found.factors[0])
    return found.explain(GRADIENT, num_backwards=len(rows) // num_ranks, of_rank_0=of_rank_0)


def _check_weights(k: int, steps: Sequence[RankStep], places: Sequence[Places], want: WholeStep) -> None:
    before, after = whole(want.before), whole(want.after)
    for rank, step in enumerate(steps):
        got = finite(rank, f"its parameters after step {k}", whole(step.weights, want.after))
        wrong = np.abs(got - after) > TOLERANCE * max(1, np.abs(after).max())
        own = np.zeros(got.size, dtype=bool)
        own[np.concatenate([found[found >= 0] for found in places[rank].values()])] = True
        if wrong.any():
            raise CheckFailed(f"after step {k} rank {rank} has {wrong.sum()} wrong numbers of {wrong.size}: "
                              + _why_weights(got, before, after, own, wrong))


def _why_weights(got: np.ndarray, before: np.ndarray, after: np.ndarray, own: np.ndarray, wrong: np.ndarray) -> str:
    stale = np.abs(got - before) <= TOLERANCE
    return likeliest(
        (stale.all(), "all parameters are as before the step. The update went into the shards: all_gather must bring "
         "these into the memory that the parameters view, not into a copy"),
        (stale[~own].all() and not wrong[own].any(), "its own shard is updated, but the rest is as before the step: "
         "gather all ranks' shards after the update"),
        (stale[wrong].all() and own[wrong].any(), "they are as before the step, though some are in its own shards: the "
         "optimizer of every rank needs the shards of all units"),
        (not got[wrong].any(), "they are zeros: did you gather the parameters, and leave out the padding?"),
        ((_nearest(np.append(after, 0), got) >= 0).all(), "they are right numbers in wrong places. all_gather brings "
         "the pieces in the order of ranks, and the padding at the end belongs to no parameter"),
        (True, "the gradients were right, so what changed the parameters besides one step of the optimizer on the "
         "shard?"))


# Checkpoints

def parts_without_zeros(parts: Sequence[Mapping[str, tuple[int, int, int]]]) -> None:
    """Each rank's local parts must be those of `Shard(0)`: what torch.chunk gives, without the padding.

    `parts` has by rank, for each sharded tensor of the checkpoint, (numbers in its local part, in all of it, first
    number): the last says where the tensor as a whole puts the part.
    """
    for rank, own in enumerate(parts):
        for name, (num, num_all, first) in own.items():
            share = max(0, min(-(-num_all // len(parts)), num_all - first))
            require(num == share, f"rank {rank}'s part of {name} has {num} numbers, but of a tensor of {num_all} it "
                    f"should have {share} on {len(parts)} ranks: leave the padding out of the local part too, as "
                    "mine(unit, tensor) does")


def saved_once(sizes: Mapping[str, int] | None, num_numbers: int, num_ranks: int) -> None:
    """A checkpoint must hold `num_numbers` of state once: all of them, none once for each rank, and no padding zeros.

    `sizes` says how many numbers are saved under each name; None if there is no checkpoint. Names with a single number,
    such as a step count, do not count.
    """
    if sizes is None:
        raise CheckFailed("there is no checkpoint that torch.distributed.checkpoint can read: is dcp.save called, on "
                          "all ranks, with checkpoint_id=folder?")
    saved = sum(size for size in sizes.values() if size > 1)
    head = f"the checkpoint has {saved} numbers, but the state has {num_numbers}: "
    refuse(saved >= 0.75 * num_ranks * num_numbers,
           f"{head}each of the {num_ranks} ranks has saved all of it, under its own name")
    refuse(saved > num_numbers, f"{head}is anything saved besides the parameters and both averages? And the zeros "
           "that pad the shards must not be saved, or the global shape depends on the number of ranks")
    refuse(3 * saved == num_numbers,
           f"{head}only parameters were saved, but the training's state includes the optimizer's")
    refuse(saved < 0.9 * num_numbers, f"{head}is each rank's part of the shard and of both averages saved? DCP takes a "
           "plain tensor to be equal on all ranks, and only one of them writes it: make it a DTensor. Or do two "
           "tensors share a name?")


def saving_failure(error: LaunchError, folder: str) -> str:
    """The message for a failed save, without the folder's name, which differs from run to run."""
    return _in_words("saving", SAVE_ERRORS, str(error), folder)


def load_failure(error: LaunchError, folder: str) -> str:
    """The message for a failed load, without the folder's name, which differs from run to run."""
    return _in_words("loading", LOAD_ERRORS, str(error), folder)


def _in_words(what: str, errors: Mapping[str, str], message: str, folder: str) -> str:
    meant = [f"{what} failed ({said}): {meaning}" for said, meaning in errors.items() if said in message]
    return meant[0] if meant else message.replace(folder, "the folder")


def continued(loaded: Sequence[StateDict], ranks: Sequence[Sequence[RankStep]], expected: Sequence[WholeStep],
              first: int, slips: Mapping[str, StateDict]) -> float:
    """What each rank loaded must be the weights before step `first`, and each step from there that of one process.

    `slips` maps messages to the weights after step `first` if something was forgotten. Returns the last loss.
    """
    where = f"on {counted(len(loaded), 'rank')}"
    for rank, weights in enumerate(loaded):
        for name in differing(expected[first].before, weights, tolerance=TOLERANCE):
            raise CheckFailed(f"{where}, rank {rank} has loaded different numbers for {name} than were saved: does "
                              "load write into the shard's own memory, and each part into its place?")
    unknown = "what else does the step depend on, and was it loaded into the optimizer that the model uses?"
    for k, want in enumerate(expected[first:]):
        got = whole(ranks[0][k].weights, want.after)
        formula = Formula(whole(want.after), [(whole(weights), why) for why, weights in slips.items() if k == 0], agree)
        require(formula.is_right(got), f"{where} the loaded weights are right, but after the next step they are not: "
                + formula.explain(got, unknown))
    return float(np.mean([own[-1].loss for own in ranks]))
