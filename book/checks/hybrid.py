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
from book.launch import LaunchError
from book.checks.verdict import (
    CheckFailed, Gradients, StateDict, agree, dense, finite, flat, magnitude, refuse, require, short,
    unmet, whole, with_hint,
)
from book.mesh import Mesh
from book.words import listed

Cuts = Mapping[str, int | None]

HINTS = {  # what a rank's error says, and what to look at
    "IndexError: tuple index out of range": "Did you use a world rank as a place in a group? dist.get_rank() counts in "
                                            "the world, dist.get_rank(group) in the group",
    "'Identity' object has no attribute": "GPTStage has replaced the blocks of other stages by placeholders: cut the "
                                          "blocks first"}
GRADIENT = {  # a gradient that should be the mean over the sequences of the batch
    "nothing": "it is 0: is it cleared between the backward and the optimizer's step?",
    "scaled": "it is {times} times what it should be{why_times}",
    "missing sequences": "{why_missing}",
    "unequal": "the sequences weigh between {lowest} and {highest}, but each should weigh 1/{size}",
    "unknown": "{why_mixed}"}
TIMES = {
    "times num_micro_batches": "it is the sum over the micro-batches, each of whose losses is a mean: scale each loss "
                               "by 1/{num_micro_batches}",
    "times num_replicas": "it is the sum over the {num_replicas} replicas: take the mean",
    "over num_micro_batches": "it is divided by the number of micro-batches twice",
    "over num_replicas": "it is divided by the number of replicas twice",
    "over ranks_of_replica": "it is divided by the number of all ranks, but a dp group adds up the gradients of only "
                             "{num_replicas} replicas",
    "times tp": "it is summed over tp, but all ranks there work on the same share and have the same gradient",
    "times batches": "it is a sum over micro-batches and replicas: divide by both"}


def mesh_failure(error: LaunchError) -> str:
    """An error of a rank on a mesh, with a hint, and without torch's report of collectives that do not match."""
    said = unmet(error, "; if you give one, is it the group of the ranks that hold the same parameters?")
    return with_hint(said, HINTS)


def drawn_alike(outputs: Sequence[Any], mesh: Mesh) -> None:
    """The outputs of a tp group's ranks, arrays of the same shape, must be 0 in the same places, as with one mask."""
    for rank, output in enumerate(outputs):
        first = mesh.group_of(rank, "tp")[0]
        if getattr(output, "shape", None) != getattr(outputs[first], "shape", 0):
            return
        zeros = int(((dense(output) == 0) != (dense(outputs[first]) == 0)).sum())
        refuse(zeros, f"ranks {first} and {rank} of one tp group have zeros in {zeros} different places of their "
               "outputs: each drew its own dropout mask. Activations that all ranks of tp hold need the same mask, or "
               "the weights that they share drift apart; and this exercise asks for no dropout")


def parts_on_mesh(held: Sequence[StateDict], drawn: Sequence[StateDict], mesh: Mesh, layout: Cuts) -> None:
    """Each rank must hold its stage's parameters, cut over tp and made from rank 0's weights.

    `drawn` has, by rank, the whole model that it was given.
    """
    for name in layout:
        stages = {mesh.coordinates(rank)["pp"] for rank, own in enumerate(held) if name in own}
        require(stages, f"no rank holds {name}: does GPTStage get the stage and the number of stages?")
        require(len(stages) == 1, f"stages {listed(sorted(stages))} hold {name}: self.part must be what GPTStage "
                "leaves for this rank's stage, which is its pp coordinate")
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
            raise CheckFailed(f"rank {rank}'s optimizer has made no step: step() must call self.optimizer.step()")
        absent = [name for name, gradient in own.items() if gradient is None]
        for name in absent:
            raise CheckFailed(f"rank {rank} has no gradient for {'any parameter' if len(absent) == len(own) else name} "
                              "when the optimizer steps: does the pipeline run before that, and is nothing cleared in "
                              "between?")
    mean = {name: np.mean([dense(own[name]) for own in single], axis=0) for name in layout}
    step = _StepGradients([own or {} for own in found], single, mesh, layout, num_micro_batches)
    for rank, own in reversed(list(enumerate(step.found))):  # mistakes of the last stage are nearest to the loss
        finite(rank, "the gradients", whole(own))
        wrong = [name for name, got in own.items()
                 if not agree(got, cut(mean[name], name, rank, mesh, layout), whole(mean))]
        if wrong:
            more = f" and {len(wrong) - 1} others" * (len(wrong) > 1)
            of = "all its parameters" if len(wrong) == len(own) else f"{wrong[0]}{more}"
            raise CheckFailed(f"rank {rank} has a wrong gradient of {of}: {step.why(rank, wrong)}")
    return magnitude(whole(mean))


class _StepGradients:
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
            return (f"sequence {listed(sorted(everywhere))} of the batch is in no rank's gradient: each replica must "
                    "take its own share, by its dp coordinate")
        return (f"it contains nothing from sequence {listed(one.absent_from())}, which another replica has: average "
                "over the dp group, whose ranks hold the same parameters and work on other sequences")

    def _why_times(self, rank: int, one: Attribution, only_whole: bool) -> str:
        """Why a gradient is a multiple of the right one."""
        if only_whole and one.is_times(self.counts["tp"]):
            return (". A parameter that is not cut is whole on every rank of tp, and so is its gradient: "
                    "identity_then_all_reduce has already summed it in backward")
        fits = [TIMES[name].format(**self.counts) for name, _ in one.patterns() if name in TIMES]
        return ": " + ("; or ".join(fits[:2]) or self._drift(rank) or "what is it scaled by, and how often?")

    def _drift(self, rank: int) -> str:
        """The message if the ranks of tp scale equal gradients by different factors; "" otherwise."""
        group = self.mesh.group_of(rank, "tp")
        found = [self._attributed(other, list(self.found[other])).times for other in group]
        factors = [np.nan if factor is None else factor for factor in found]
        if np.allclose(factors, factors[0], rtol=1e-6):
            return ""
        return (f"ranks {listed(group)} of one tp group scale theirs by {in_words(factors)}, so weights that they "
                "share, such as the norms', drift apart: did each clip by the norm of its own part?")

    def _why_mixed(self, rank: int, wrong: Sequence[str]) -> str:
        """Find the axes along which gradients of different parameters were added up."""
        # Parameters that are not cut do not show a sum over tp: all its ranks have the same.
        split = [name for name in wrong if self.layout[name] is not None]
        name = max(split or wrong, key=lambda name: flat(self.found[rank][name]).size)
        for axes in (axes for size in (1, 2, 3) for axes in combinations(self.mesh.axes, size) if axes != ("dp",)):
            total = self._added(rank, name, axes)
            times = None if total is None else Attribution(self.found[rank][name], total[None]).times
            if times is not None:
                return (f"that of {name} is {short(times)} times a sum over {'+'.join(axes)}, whose ranks hold "
                        "different parameters: average over dp alone")
        return ("it is not a sum of its own sequences' gradients: was something else added to it, such as gradients "
                "that were not cleared or those of other parameters? Do all tp and pp ranks of a replica work on the "
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


def _why_part(got: np.ndarray, name: str, rank: int, drawn: Sequence[StateDict], mesh: Mesh, layout: Cuts) -> str:
    want = cut(drawn[0][name], name, rank, mesh, layout)
    if got.shape != want.shape:
        here = "is whole" if got.shape == dense(drawn[0][name]).shape else f"has the shape {got.shape}"
        return f"{here}, but its part has {want.shape}: is every block cut exactly once, over the tp group?"
    if np.array_equal(got, cut(drawn[rank][name], name, rank, mesh, layout)):
        return ("is made from this rank's own weights, but all ranks must start from rank 0's: broadcast these before "
                "you cut anything")
    for other in range(mesh.world_size):
        if np.array_equal(got, cut(drawn[other][name], name, rank, mesh, layout)):
            return f"is made from rank {other}'s weights, but all ranks must start from rank 0's"
        if np.array_equal(got, cut(drawn[0][name], name, other, mesh, layout)):
            return (f"is the part that belongs to rank {other}: a rank's part follows from its tp coordinate (did you "
                    "broadcast the weights after the cut?)")
    return "is not a part of rank 0's"
