"""L3, lab 7: a training step on a mesh, taken apart: who holds which part of which weight, and whose gradient.

States and gradients come by rank, as dicts with the names of the whole model. `layout` says for each name along which
dim it is cut over tp, None where each rank has it whole. Axes are called pp, dp and tp.
"""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any

import numpy as np

from book.checks.attribution import Attribution, in_words
from book.checks.verdict import (
    CheckFailed, Gradients, State, agree, dense, finite, flat, hint_for, listed, magnitude, refuse, require, short,
    unmet, whole,
)
from book.mesh import Mesh

Cuts = Mapping[str, int | None]

HINTS = {  # what a rank's error says, and what to look at
    "IndexError: tuple index out of range": "Is a rank of the world taken for a place in a group? dist.get_rank() "
                                            "counts in the world, dist.get_rank(group) in the group",
    "'Identity' object has no attribute": "GPTStage has put empty places where the blocks of other stages were: cut "
                                          "the blocks first"}
GRADIENT = {  # a gradient that should be the mean over the sequences of the batch
    "nothing": "it is 0: is it cleared between backward and the optimizer's step?",
    "scaled": "it is {times} times what it should be{why_times}",
    "missing sequences": "{why_missing}",
    "unequal": "the sequences weigh between {lowest} and {highest}, and each should weigh 1/{size}",
    "unknown": "{why_mixed}"}
TIMES = {
    "times num_micro_batches": "the gradients of the micro-batches add up, and each is that of a mean: scale each loss "
                               "by 1/{num_micro_batches}",
    "times num_replicas": "it is the sum over the {num_replicas} replicas: take the mean",
    "over num_micro_batches": "it is divided by the number of micro-batches twice",
    "over num_replicas": "it is divided by the number of replicas twice",
    "over ranks_of_replica": "it is divided by the number of all ranks: what a dp group adds up is the gradients of "
                             "{num_replicas} replicas",
    "times tp": "it is summed over tp, where all ranks have the same share",
    "times batches": "it is a sum over micro-batches and replicas: divide by both"}


def mesh_failure(message: str) -> str:
    """An error of a rank on a mesh, with a hint, and without torch's report of collectives that do not match."""
    hint = hint_for(message, HINTS)
    said = unmet(message, "; with one, is it the group of ranks that hold the same parameters?")
    return f"{said}\n{hint}" if hint else said


def drawn_alike(outputs: Sequence[Any], mesh: Mesh) -> None:
    """The outputs of a tp group's ranks, arrays of one shape, must be 0 in the same places, as with one mask."""
    for rank, output in enumerate(outputs):
        first = mesh.group_of(rank, "tp")[0]
        if getattr(output, "shape", None) != getattr(outputs[first], "shape", 0):
            return
        zeros = int(((dense(output) == 0) != (dense(outputs[first]) == 0)).sum())
        refuse(zeros, f"ranks {first} and {rank} of one tp group have zeros in {zeros} different places of their "
               "outputs: each has drawn a dropout mask of its own. What all ranks of tp hold needs the same mask, or "
               "the weights that they hold alike drift apart; and this exercise asks for no dropout")


def parts_on_mesh(held: Sequence[State], drawn: Sequence[State], mesh: Mesh, layout: Cuts) -> None:
    """Each rank must hold its stage's parameters, cut over tp, from rank 0's weights.

    `drawn` has by rank the whole model that it was given.
    """
    for name in layout:
        stages = {mesh.coordinates(rank)["pp"] for rank, own in enumerate(held) if name in own}
        require(stages, f"no rank holds {name}: does GPTStage get the stage and the number of stages?")
        require(len(stages) == 1, f"stages {listed(sorted(stages))} hold {name}: self.part is what GPTStage leaves to "
                "this rank's stage, by its pp coordinate")
    for rank, own in enumerate(held):
        for name, value in own.items():
            if not np.array_equal(dense(value), cut(drawn[0][name], name, rank, mesh, layout)):
                raise CheckFailed(f"rank {rank}'s {name} {_why_part(dense(value), name, rank, drawn, mesh, layout)}")


def cut(value: Any, name: str, rank: int, mesh: Mesh, layout: Cuts) -> np.ndarray:
    """The part of a whole tensor that a rank holds."""
    dim, place = layout[name], mesh.coordinates(rank)["tp"]
    return dense(value) if dim is None else np.array_split(dense(value), mesh.size("tp"), axis=dim)[place]


def mesh_gradients(found: Sequence[Gradients | None], single: Sequence[Gradients], mesh: Mesh, layout: Cuts,
                   num_micro_batches: int) -> float:
    """Every rank must hold its part of the mean of `single`, the gradients of the batch's sequences one by one.

    Returns the sum of the absolute values of the whole gradient.
    """
    for rank, own in enumerate(found):
        if own is None:
            raise CheckFailed(f"rank {rank}'s optimizer has made no step: step() ends with self.optimizer.step()")
        absent = [name for name, gradient in own.items() if gradient is None]
        for name in absent:
            raise CheckFailed(f"rank {rank} has no gradient for {'any parameter' if len(absent) == len(own) else name} "
                              "when the optimizer steps: does the pipeline run before, and is nothing cleared after "
                              "it?")
    mean = {name: np.mean([dense(own[name]) for own in single], axis=0) for name in layout}
    step = _Step([own or {} for own in found], single, mesh, layout, num_micro_batches)
    for rank, own in reversed(list(enumerate(step.found))):  # the last stage's mistakes are nearest to the loss
        finite(rank, "the gradients", whole(own))
        wrong = [name for name, got in own.items()
                 if not agree(got, cut(mean[name], name, rank, mesh, layout), whole(mean))]
        if wrong:
            more = f" and {len(wrong) - 1} others" * (len(wrong) > 1)
            of = "all its parameters" if len(wrong) == len(own) else f"{wrong[0]}{more}"
            raise CheckFailed(f"rank {rank} has a wrong gradient of {of}: {step.why(rank, wrong)}")
    return magnitude(whole(mean))


class _Step:
    """The gradients that one step left on the ranks, and what they could have been."""

    def __init__(self, found: Sequence[Gradients], single: Sequence[Gradients], mesh: Mesh, layout: Cuts,
                 num_micro_batches: int) -> None:
        self.found, self.single, self.mesh, self.layout = found, single, mesh, layout
        dp, tp = mesh.size("dp"), mesh.size("tp")
        self.counts = {"num_micro_batches": num_micro_batches, "num_replicas": dp,
                       "ranks_of_replica": mesh.world_size // dp, "tp": tp, "batches": num_micro_batches * dp}

    def why(self, rank: int, wrong: Sequence[str]) -> str:
        """What is wrong with the gradients of the parameters with these names on this rank."""
        every, split = len(wrong) == len(self.found[rank]), [name for name in wrong if self.layout[name] is not None]
        kept = [name for name in wrong if self.layout[name] is None]
        one = self._attributed(rank, wrong if every else max((split or kept, kept), key=len))
        return one.explain(GRADIENT, why_times="" if one.times is None else
                           self._why_times(rank, one, only_whole=not split and not every),
                           why_missing=self._why_missing(one) if one.absent_from() else "",
                           why_mixed=self._why_mixed(rank, wrong) if one.factors is None else "")

    def _attributed(self, rank: int, names: Sequence[str]) -> Attribution:
        """What a rank's gradients of these names are made of, by sequence."""
        rows = [np.concatenate([cut(own[name], name, rank, self.mesh, self.layout).ravel() for name in names])
                for own in self.single]
        return Attribution(whole(self.found[rank], names), rows, 1 / len(rows), None, ("sequences",), self.counts)

    def _why_missing(self, one: Attribution) -> str:
        absent = [set(self._attributed(rank, list(own)).absent_from()) for rank, own in enumerate(self.found)]
        everywhere = set(one.absent_from()).intersection(*absent)
        if everywhere:
            return (f"sequence {listed(sorted(everywhere))} of the batch is in no rank's gradient: each replica takes "
                    "a share of its own, by its dp coordinate")
        return (f"it has nothing of sequence {listed(one.absent_from())}, which another replica has: the ranks that "
                "hold the same parameters on other sequences are those of its dp group; average over them")

    def _why_times(self, rank: int, one: Attribution, only_whole: bool) -> str:
        """Why a gradient is a multiple of the right one."""
        if only_whole and one.is_times(self.counts["tp"]):
            return (". What is not cut is whole on every rank of tp, and so is its gradient: the way back into the cut "
                    "layers has summed it already")
        fits = [TIMES[name].format(**self.counts) for name, _ in one.patterns() if name in TIMES]
        return ": " + ("; or ".join(fits[:2]) or self._drift(rank) or "by what is it scaled, and how often?")

    def _drift(self, rank: int) -> str:
        """The message if the ranks of tp scale equal gradients by different factors; "" otherwise."""
        group = self.mesh.group_of(rank, "tp")
        found = [self._attributed(other, list(self.found[other])).times for other in group]
        factors = [np.nan if factor is None else factor for factor in found]
        if np.allclose(factors, factors[0], rtol=1e-6):
            return ""
        return (f"ranks {listed(group)} of one tp group scale theirs by {in_words(factors)}. Weights that they hold "
                "alike, such as the norms', drift apart: has each clipped by the norm of its own part?")

    def _why_mixed(self, rank: int, wrong: Sequence[str]) -> str:
        """Find the axes over which gradients of different parameters were added up."""
        # Parameters that are not cut do not show a sum over tp: all its ranks have the same.
        split = [name for name in wrong if self.layout[name] is not None]
        name = max(split or wrong, key=lambda name: flat(self.found[rank][name]).size)
        for axes in (axes for size in (1, 2, 3) for axes in combinations(self.mesh.axes, size) if axes != ("dp",)):
            total = self._added(rank, name, axes)
            times = None if total is None else Attribution(self.found[rank][name], total[None]).times
            if times is not None:
                return (f"that of {name} is {short(times)} times a sum over {'+'.join(axes)}, whose ranks hold "
                        "different parameters: average over dp alone")
        return ("it is no sum of its own sequences' gradients: was something else added to it, such as gradients that "
                "were not cleared or those of other parameters? Do all ranks of tp and pp of a replica work on the "
                "same share?")

    def _added(self, rank: int, name: str, axes: tuple[str, ...]) -> np.ndarray | None:
        """The sum, along these axes, of the ranks' gradients of a parameter before anything is averaged."""
        shares = np.array_split(np.arange(len(self.single)), self.mesh.size("dp"))
        parts, size = [], flat(self.found[rank][name]).size
        for other in self.mesh.group_of(rank, *axes):
            mean = np.mean([dense(self.single[b][name]) for b in shares[self.mesh.coordinates(other)["dp"]]], axis=0)
            parts.append(cut(mean, name, other, self.mesh, self.layout).ravel())
            if name not in self.found[other] or parts[-1].size != size:
                return None
        return np.sum(parts, axis=0)


def _why_part(got: np.ndarray, name: str, rank: int, drawn: Sequence[State], mesh: Mesh, layout: Cuts) -> str:
    want = cut(drawn[0][name], name, rank, mesh, layout)
    if got.shape != want.shape:
        here = "is whole" if got.shape == dense(drawn[0][name]).shape else f"has the shape {got.shape}"
        return f"{here}, its part has {want.shape}: is every block cut, once, over the tp group?"
    if np.array_equal(got, cut(drawn[rank][name], name, rank, mesh, layout)):
        return ("is made from the weights that this rank drew: all ranks start from rank 0's, so hand these out before "
                "anything is cut")
    for other in range(mesh.world_size):
        if np.array_equal(got, cut(drawn[other][name], name, rank, mesh, layout)):
            return f"is made from the weights that rank {other} drew: all ranks start from rank 0's"
        if np.array_equal(got, cut(drawn[0][name], name, other, mesh, layout)):
            return (f"is the part that belongs to rank {other}: a rank's part follows from its tp coordinate (were the "
                    "weights handed out after the cut?)")
    return "is not a part of rank 0's"
