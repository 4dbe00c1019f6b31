"""L3, lab 6: replicas of a pipeline, which average each stage's gradients: where they start, their shares, the mean.

Parameters and gradients come as one dict per rank, name -> tensor or array, with the names of the whole model. Rank
s * num_replicas + k has stage s of replica k.
"""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from book.checks.attribution import Attribution
from book.checks.formula import Formula
from book.checks.pipeline_parallel import stage_gradients
from book.checks.verdict import (
    CheckFailed, Gradients, StateDict, dense, differing, identical, likeliest, refuse, require, short, unmet, whole,
    with_hint,
)
from book.launch import LaunchError
from book.trace import Trace
from book.words import listed


def failure_of_replicas(error: LaunchError) -> str:
    """An error of a rank in a pipeline of replicas, with a hint, without torch's report of unmatched collectives."""
    said = unmet(error, ": give group=, the group of the ranks that hold the same stage")
    return with_hint(said, {"Expected parameter `tensor`": "Only the last stage of each replica has a loss to average: "
                            "on the others `losses` is empty, and its sum is the number 0"})


def same_replicas(held: Sequence[StateDict], starts: Sequence[StateDict], num_replicas: int) -> None:
    """Rank s * `num_replicas` + k must hold stage s of replica k, with the weights that replica 0's rank drew.

    `starts` has, by rank, the whole model that it was given.
    """
    for rank, own in enumerate(held):
        root = rank // num_replicas * num_replicas
        place = f"rank {rank}, replica {rank - root}'s stage {rank // num_replicas},"
        require(set(own) == set(held[root]), f"{place} holds other parameters than rank {root}, which has that stage "
                "of replica 0: rank = stage * num_replicas + replica")
        for name in differing(own, starts[root]):
            refuse(identical(own[name], starts[rank][name]), f"{place} starts with its own {name}, which differs from "
                   f"rank {root}'s: averaged gradients keep replicas equal only if they start equal")
            raise CheckFailed(f"{place} has a {name} that is not rank {root}'s: broadcast replica 0's weights to the "
                              "ranks with the same stage")


def shares_of_replicas(rows: Sequence[Sequence[int]], num_sequences: int, num_replicas: int) -> None:
    """Each rank's forwards, `rows` sequences long, must together be its replica's share of the batch."""
    share = num_sequences // num_replicas
    for rank, own in enumerate(rows):
        require(own, f"rank {rank} has run no forward of a Recorded pipeline")
        require(sum(own) == share, f"rank {rank} puts {sum(own)} sequences through its stage, but a replica's share of "
                f"the batch is {share} of {num_sequences}")
        require(len(own) > 1, f"rank {rank} puts its {share} sequences through in one forward: cut them into "
                "micro-batches")


def gradients_of_replicas(found: Sequence[Gradients], single: Sequence[Gradients], num_replicas: int) -> float:
    """Every replica's stages must hold the mean gradient of the batch's sequences, one by one in `single`.

    `found` is by rank, as in `same_replicas`. Returns what `stage_gradients` does for a replica.
    """
    hints = {num_replicas: f"your {num_replicas} replicas hold the sum of their gradients: take the mean",
             1 / num_replicas: f"the mean is divided by the number of replicas, {num_replicas}, once too often" +
             f", or the sum by the number of all ranks, {len(found)}" * (len(found) == num_replicas**2)}
    for replica in range(num_replicas):
        try:
            total = stage_gradients(found[replica::num_replicas], single, what="sequence", hints=hints)
        except CheckFailed as error:
            last, mixed = found[-num_replicas:], "not a sum" in str(error)
            asked = (" And do all its stages take their replica's share, with replica 0's weights before the pipeline "
                     "runs?" * mixed)
            raise CheckFailed(_why_apart(last, single) or _left_out(last[0], single)
                              or f"replica {replica}, {error}{asked}") from None
    return total


def _why_apart(last: Sequence[Gradients], single: Sequence[Gradients]) -> str:
    """Why the gradients of all replicas' last stages lack sequences; "" if not all do."""
    if any(gradient is None for own in last for gradient in own.values()):
        return ""
    absent = [set(Attribution(whole(own), [whole(one, own) for one in single]).absent_from()) for own in last]
    nowhere = sorted(set.intersection(*absent))
    return likeliest(
        (nowhere, f"sequence {listed(nowhere)} is in no replica's gradient: each replica must take its own share"),
        (all(absent), "each replica's last stage has only the gradient of its own sequences: average over the ranks "
         "that hold the same stage"))


def _left_out(own: Gradients, single: Sequence[Gradients]) -> str:
    """Why some parameters of a stage lack sequences that others have; "" if none do."""
    lacking = [name for name, gradient in own.items() if gradient is not None and Attribution(
        whole({name: gradient}), [whole({name: one[name]}) for one in single]).absent_from()]
    if not 0 < len(lacking) < len(own):
        return ""
    return (f"the gradient of {lacking[0]} lacks the other replicas' sequences, which those of other parameters "
            "contain: average all gradients, biases and norms too")


def losses_of_replicas(got: Sequence[Any], losses: Sequence[float], num_replicas: int) -> float:
    """The last stage of every replica must return the loss of the whole batch, other stages None.

    `got` is by rank, as in `same_replicas`; `losses` are those of the batch's sequences. Returns the batch's loss.
    """
    for place, loss in enumerate(got[:-num_replicas]):
        refuse(loss is not None, f"a rank with stage {place // num_replicas} returned a loss, but only the last stage "
               "has one: return None elsewhere")
    mean = float(np.mean(losses))
    for replica, loss in enumerate(got[-num_replicas:]):
        require(loss is not None, f"the last stage of replica {replica} returned no loss")
        shares = [np.array(losses[replica::num_replicas]), np.array_split(losses, num_replicas)[replica]]
        own = "it is the loss of the replica's own share: that of the whole batch takes an all-reduce"
        formula = Formula(mean, [
            (mean * num_replicas, "it is the sum over the replicas: take the mean"),
            (mean * num_replicas / len(got), "it is divided by the number of all ranks, but the group adds up only the "
             "replicas' losses"),
            *((float(np.mean(share)), own) for share in shares)])
        formula.require_right(f"the loss of the batch on replica {replica}", loss)
    return mean


def finished(has_finished: bool) -> None:
    """On a rank: the pipeline's `finish` must have been called."""
    require(has_finished, "your pipeline's finish() was not called: a rank must not go on, or end, before what it sent "
            "has been taken")


def averaged_once(trace: Trace, gradients: Sequence[Gradients]) -> None:
    """No rank may give to all-reduces much more than the bytes of its gradients, which `gradients` has by rank."""
    for rank, own in enumerate(gradients):
        given = sum(event.num_bytes or 0 for event in trace.of_rank(rank) if event.op == "all_reduce")
        much = given / sum(dense(gradient).nbytes for gradient in own.values())
        require(much < 1.5, f"rank {rank} gives to all-reduces {short(much)} times the bytes of its gradients: average "
                "them once, when all its backwards are done")
