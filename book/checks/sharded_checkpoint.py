"""L3: checkpoints of sharded state: each number saved once, and training that goes on with them on other ranks."""
from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from book.checks.compare import TOLERANCE, State, agree, differing, whole
from book.checks.sharded import Step, Whole
from book.checks.verdict import CheckFailed

# What DCP says when a checkpoint does not have what is asked for, and what it means here.
LOAD_ERRORS = {
    "Size mismatch": "a tensor has another length now than when it was saved. Were the zeros saved that fill a shard "
                     "up, or the shard alone? Its global shape is that of the unit, and no number of ranks is in it",
    "Missing key": "a name that is asked for was not saved: names may not depend on the rank or the number of ranks, "
                   "and save and load go through the same dict",
    "KeyError: 'step'": "a new optimizer has no state yet: call start_state first",
    "exp_avg": "an optimizer that has made no step has no state to load into: call start_state(zero) first",
}


def parts_without_zeros(parts: Sequence[Mapping[str, tuple[int, int, int]]]) -> None:
    """Each rank's local parts must be those of `Shard(0)`: what torch.chunk gives, without what fills shards up.

    `parts` has by rank, for each sharded tensor of the checkpoint, (numbers in its local part, in all of it, first
    number): the last says where the tensor as a whole puts the part.
    """
    for rank, own in enumerate(parts):
        for name, (num, num_all, first) in own.items():
            share = max(0, min(-(-num_all // len(parts)), num_all - first))
            if num != share:
                raise CheckFailed(f"rank {rank}'s part of {name} has {num} numbers, and of a tensor of {num_all} it "
                                  f"has {share} on {len(parts)} ranks: take the zeros that fill the shard up out of "
                                  "the local part too. mine(unit, tensor) does")


def saved_once(sizes: Mapping[str, int] | None, num_numbers: int, num_ranks: int) -> None:
    """A checkpoint must hold `num_numbers` of state once: no fewer, none for every rank, and no zeros between them.

    `sizes` says how many numbers are saved under each name, None where there is no checkpoint. Names with a single
    number, such as a step's, may come on top.
    """
    if sizes is None:
        raise CheckFailed("there is no checkpoint that torch.distributed.checkpoint can read: is dcp.save called, on "
                          "all ranks, with checkpoint_id=folder?")
    saved = sum(size for size in sizes.values() if size > 1)
    if saved >= 0.75 * num_ranks * num_numbers:
        raise CheckFailed(f"the checkpoint has {saved} numbers, the state {num_numbers}: every one of {num_ranks} "
                          "ranks has saved all of it, under a name of its own")
    if saved > num_numbers:
        raise CheckFailed(f"the checkpoint has {saved} numbers, the state {num_numbers}: the zeros that fill the "
                          "shards up must not be saved, or the global shape depends on the number of ranks")
    if saved < 0.9 * num_numbers:
        raise CheckFailed(f"the checkpoint has {saved} numbers, the state {num_numbers}: " + (
            "parameters alone are not the training's state, which is the optimizer's too" if 3 * saved == num_numbers
            else "is each rank's part saved, of the shard and of both averages? A plain tensor counts as equal on all "
                 "ranks, and one of them writes it: make it a DTensor. Or do two tensors share a name?"))


def load_failure(message: str, folder: str) -> str:
    """What to say when loading failed with `message`; the folder's name, another one each time, is left out."""
    for said, meaning in LOAD_ERRORS.items():
        if said in message:
            return f"loading failed ({said}): {meaning}"
    return message.replace(folder, "the folder")


def continued(loaded: Sequence[State], ranks: Sequence[Sequence[Step]], expected: Sequence[Whole], first: int,
              slips: Mapping[str, State]) -> float:
    """What each rank loaded must be the weights before step `first`, and each step from there that of one process.

    `slips` has, by what to say of it, the weights after step `first` where something was forgotten. Returns the last
    loss.
    """
    num = len(loaded)
    for rank, weights in enumerate(loaded):
        wrong = differing(expected[first].before, weights, tolerance=TOLERANCE)
        if wrong:
            raise CheckFailed(f"on {num} rank{'s' * (num > 1)}, rank {rank} has loaded other numbers for {wrong[0]} "
                              "than were saved: does load write into the shard's own memory, and each part into its "
                              "place?")
    for k, want in enumerate(expected[first:]):
        got = whole({name: ranks[0][k].weights[name] for name in want.after})
        said = [why for why, weights in slips.items() if k == 0 and agree(got, whole(weights))]
        if not agree(got, whole(want.after)):
            raise CheckFailed(f"on {num} rank{'s' * (num > 1)} the weights that were loaded are right, and after the "
                              "next step they are not: " + (said or [
                                  "what else does the step depend on, and was it loaded into the optimizer that the "
                                  "model uses?"])[0])
    return float(np.mean([own[-1].loss for own in ranks]))
