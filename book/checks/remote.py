"""L3: pipelines that a driver runs over RPC, and replicas of pipelines: what was sent to whom, and who learned what.

States and gradients come as one dict per stage, name -> tensor or array, with the names of the whole model.
"""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from book.checks.compare import (
    TOLERANCE, Gradients, State, differing, flat, identical, is_zero, magnitude, multiples, whole,
)
from book.checks.pipeline import stage_gradients
from book.checks.verdict import CheckFailed, listed, number, unmet


def remote_failure(message: str) -> str:
    """An error of a rank that trains over RPC, in words where torch has none."""
    if "graphTask_" in message:
        return ("the gradient comes to a remote call, and nobody there expects it: loss.backward() knows this process "
                "alone, dist_autograd.backward(context_id, [loss]) knows them all")
    return message


def failure_of_replicas(message: str) -> str:
    """An error of a rank in a pipeline of replicas, without torch's account of the collectives that did not meet."""
    return unmet(message, ": give group=, the ranks that hold the same stage")


def rows_in_calls(rows: Sequence[Sequence[int]], wanted: Sequence[int]) -> None:
    """`rows` has for each stage how many sequences each of its calls in one step brought: the micro-batches' sizes."""
    for stage, own in enumerate(rows):
        if sorted(own) == sorted(wanted):
            continue
        if len(own) == 1 and own[0] == sum(wanted):
            raise CheckFailed(f"stage {stage} gets the whole batch in one call: cut it into {len(wanted)} "
                              "micro-batches")
        raise CheckFailed(f"in one step the calls of stage {stage} bring {listed(own) or 'no'} sequences, "
                          f"the {len(wanted)} micro-batches have {listed(wanted)}")


def in_company(together: bool | None) -> None:
    """The first stage must have been given its second micro-batch before the last one was done with the first."""
    if not together:
        raise CheckFailed("the second micro-batch is sent when the first one is through, so one stage works at a time: "
                          "start all calls, then wait (rpc_sync, wait() and to_here() each wait)")


def from_stage_to_stage(owners: Sequence[Sequence[str]]) -> None:
    """`owners` has for each stage the workers that it fetched its inputs from: from stage 1 on, the stage before.

    Worker 0 is the driver, worker s + 1 has stage s.
    """
    for stage, own in enumerate(owners[1:], 1):
        strange = sorted(set(own) - {f"worker{stage}"})
        if strange:
            who = "the driver" if strange[0] == "worker0" else strange[0]
            raise CheckFailed(f"stage {stage} fetches an input from {who}, not from stage {stage - 1}: hand on the "
                              "reference that stage.remote() gives, and the tensor stays where it is until then")


def first_updates(before: Sequence[State], after: Sequence[State], single: Sequence[Gradients], learning_rate: float,
                  weights: Sequence[float]) -> float:
    """One step of plain SGD must have moved every stage's weights along the gradient of the whole batch.

    `single` are the gradients of its micro-batches, and `weights` their shares of the batch. Returns what
    `stage_gradients` does.
    """
    found = [{name: (flat(own[name]) - flat(now[name])) / learning_rate for name in own}
             for own, now in zip(before, after)]
    idle = [stage for stage, update in enumerate(found) if not any(step.any() for step in update.values())]
    if len(idle) == len(found):
        raise CheckFailed("no stage's weights have changed in the first step: does the optimizer step, with the "
                          "context's id, while the context is open? And did the forwards run inside the context?")
    if idle:
        raise CheckFailed(f"stage {idle[0]}'s weights have not changed in the first step: are its parameters among "
                          "those that the optimizer was given?")
    try:
        return stage_gradients(found, single, weights)
    except CheckFailed as error:
        asked = "no sum" in str(error)
        raise CheckFailed(f"{error}" + " And does the optimizer step once, for the whole batch?" * asked) from None


def losses_of_steps(got: Sequence[Any], expected: Sequence[float], num_first: int) -> None:
    """`got` has what two calls returned, of `num_first` steps and of the rest: the losses of one process."""
    for own, wanted in zip(got, (expected[:num_first], expected[num_first:])):
        if not isinstance(own, Sequence) or len(own) != len(wanted):
            length = len(own) if isinstance(own, Sequence) else "no"
            raise CheckFailed(f"{length} losses are returned for {len(wanted)} step{'s' * (len(wanted) > 1)}: return a "
                              "list with one number for each")
    for step, (loss, wanted) in enumerate(zip([*got[0], *got[1]], expected)):
        try:
            number(f"the loss of step {step}", loss, wanted)
        except CheckFailed as error:
            why = ("is anything left over from the steps before, such as their gradients in a context that all share?"
                   if step > num_first else "is it the mean over the whole batch, before the step is made?")
            raise CheckFailed(f"{error}: {why}") from None


def same_weights(held: Sequence[State], expected: State) -> float:
    """The stages together must hold `expected`, what one process ends with. Returns the sum of absolute values."""
    scale = whole(expected)
    for stage, own in enumerate(held):
        for name in differing(own, expected, scale, TOLERANCE):
            raise CheckFailed(f"the losses are right, but {name} of stage {stage} ends with other numbers than in one "
                              "process: does the optimizer step after the last loss too?")
    return magnitude(scale)


def same_replicas(held: Sequence[State], starts: Sequence[State], num_replicas: int) -> None:
    """Rank s * `num_replicas` + k must hold stage s of replica k, with the weights that replica 0's rank drew.

    `starts` has, by rank, the whole model that it was given.
    """
    for rank, own in enumerate(held):
        root = rank // num_replicas * num_replicas
        place = f"rank {rank}, replica {rank - root}'s stage {rank // num_replicas},"
        if set(own) != set(held[root]):
            raise CheckFailed(f"{place} holds other parameters than rank {root}, which has that stage of replica 0: "
                              "rank = stage * num_replicas + replica")
        for name in differing(own, starts[root]):
            if identical(own[name], starts[rank][name]):
                raise CheckFailed(f"{place} starts with its own {name} and rank {root} with another: averaged "
                                  "gradients keep replicas together only if they start together")
            raise CheckFailed(f"{place} has a {name} that is not rank {root}'s: hand out replica 0's weights, to the "
                              "ranks with the same stage")


def shares_of_replicas(rows: Sequence[Sequence[int]], num_sequences: int, num_replicas: int) -> None:
    """`rows` has by rank how many sequences each forward had: together the replica's share of the batch."""
    share = num_sequences // num_replicas
    for rank, own in enumerate(rows):
        if not own:
            raise CheckFailed(f"rank {rank} has run no forward of a Recorded pipeline")
        if sum(own) != share:
            raise CheckFailed(f"rank {rank} puts {sum(own)} sequences through its stage: a replica's share of the "
                              f"batch is {share} of {num_sequences}")
        if len(own) == 1:
            raise CheckFailed(f"rank {rank} puts its {share} sequences through in one forward: cut them into "
                              "micro-batches")


def groups_by_all(asked: Sequence[Sequence[int] | None]) -> None:
    """`asked` has by rank the group that it makes with `new_group` at one moment: all ranks must make the same."""
    for rank, ranks in enumerate(asked):
        if ranks != asked[0]:
            raise CheckFailed(f"rank 0 makes the group of {_group(asked[0])} while rank {rank} makes that of "
                              f"{_group(ranks)}: every rank of the world makes every group, in one order")


def _group(ranks: Sequence[int] | None) -> str:
    return "all ranks" if ranks is None else f"ranks {listed(ranks)}"


def gradients_of_replicas(found: Sequence[Gradients], single: Sequence[Gradients], num_replicas: int) -> float:
    """Every replica's stages must hold the mean gradient of the batch's sequences, one by one in `single`.

    `found` is by rank, as in `same_replicas`. Returns what `stage_gradients` does for a replica.
    """
    hints = {num_replicas: f"your {num_replicas} replicas hold the sum of their gradients: take the mean",
             1 / num_replicas: f"the mean is divided by the {num_replicas} replicas once more"}
    for replica in range(num_replicas):
        try:
            total = stage_gradients(found[replica::num_replicas], single, what="sequence", hints=hints)
        except CheckFailed as error:
            raise CheckFailed(_why_apart(found[-num_replicas:], single) or f"replica {replica}, {error}") from None
    return total


def _why_apart(last: Sequence[Gradients], single: Sequence[Gradients]) -> str:
    """Why sequences are missing in the gradients that the replicas' last stages hold; "" if none is."""
    absent = []
    for own in last:
        if any(gradient is None for gradient in own.values()):
            return ""
        factors = multiples(np.stack([whole({name: one[name] for name in own}) for one in single]), whole(own))
        absent.append(set() if factors is None else set(np.flatnonzero(is_zero(factors)).tolist()))
    if all(absent) and not set.intersection(*absent):
        return ("each replica's last stage has the gradient of its own sequences and nothing of the other replicas': "
                "average over the ranks that hold the same stage")
    if all(absent):
        return (f"sequence {listed(sorted(set.intersection(*absent)))} is in no replica's gradient: each "
                "replica takes a share of its own")
    return ""


def losses_of_replicas(got: Sequence[Any], losses: Sequence[float], num_replicas: int) -> float:
    """The last stage of every replica must return the loss of the whole batch; `losses` are its sequences'.

    Returns that loss.
    """
    for replica, loss in enumerate(got[-num_replicas:]):
        if loss is None:
            raise CheckFailed(f"the last stage of replica {replica} returned no loss")
        mean = float(np.mean(losses))
        shares = [np.array(losses[replica::num_replicas]), np.array_split(losses, num_replicas)[replica]]
        own = "it is that of the replica's own share: the loss of the whole batch takes an all-reduce"
        number(f"the loss of the batch on replica {replica}", loss, mean, [
            (mean * num_replicas, "it is the sum over the replicas: take the mean"),
            *((float(np.mean(share)), own) for share in shares)])
    return mean
