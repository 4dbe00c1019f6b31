"""L3: a training step on a mesh, taken apart: who holds which part of which weight, and whose gradient.

States and gradients come by rank, as dicts with the names of the whole model. `layout` says for each name along which
dim it is cut over tp, None where each rank has it whole. Axes are called pp, dp and tp.
"""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any

import numpy as np

from book.checks.compare import (SIX_DIGITS, Gradients, State, agree, dense, flat, is_zero, magnitude, multiples,
                                 whole)
from book.checks.verdict import CheckFailed, finite, listed, short, unmet
from book.mesh import Mesh

Cuts = Mapping[str, int | None]


HINTS = {
    "IndexError: tuple index out of range": "Is a rank of the world taken for a place in a group? dist.get_rank() "
                                            "counts in the world, dist.get_rank(group) in the group",
    "'Identity' object has no attribute": "GPTStage has put empty places where the blocks of other stages were: cut "
                                          "the blocks first",
}


def mesh_failure(message: str) -> str:
    """An error of a rank on a mesh, with a hint, and without torch's account of the collectives that did not meet."""
    hint = next((hint for word, hint in HINTS.items() if word in message), None)
    said = unmet(message, "; with one, is it the group of ranks that hold the same parameters?")
    return f"{said}\n{hint}" if hint else said


def drawn_alike(outputs: Sequence[Any], mesh: Mesh) -> None:
    """The outputs of a tp group's ranks, arrays of one shape, must be 0 in the same places, as with one mask."""
    for rank, output in enumerate(outputs):
        first = mesh.group_of(rank, "tp")[0]
        if getattr(output, "shape", None) != getattr(outputs[first], "shape", 0):
            return
        zeros = int(((dense(output) == 0) != (dense(outputs[first]) == 0)).sum())
        if zeros:
            raise CheckFailed(f"ranks {first} and {rank} of one tp group have zeros in {zeros} different places of "
                              "their outputs: each has drawn a dropout of its own. What is whole on all ranks of tp "
                              "takes one mask, or the weights that they hold alike drift apart; and here none is "
                              "asked for")


def parts_on_mesh(held: Sequence[State], drawn: Sequence[State], mesh: Mesh, layout: Cuts) -> None:
    """Each rank must hold its stage's parameters, cut over tp, from rank 0's weights.

    `drawn` has by rank the whole model that it was given.
    """
    for name in layout:
        stages = {mesh.coordinates(rank)["pp"] for rank, own in enumerate(held) if name in own}
        if not stages:
            raise CheckFailed(f"no rank holds {name}: does GPTStage get the stage and the number of stages?")
        if len(stages) > 1:
            raise CheckFailed(f"stages {listed(sorted(stages))} hold {name}: self.part is what GPTStage leaves to this "
                              "rank's stage, by its pp coordinate")
    for rank, own in enumerate(held):
        for name, value in own.items():
            want = cut(drawn[0][name], name, rank, mesh, layout)
            if not np.array_equal(dense(value), want):
                raise CheckFailed(f"rank {rank}'s {name} {_why_part(dense(value), name, rank, drawn, mesh, layout)}")


def cut(value: Any, name: str, rank: int, mesh: Mesh, layout: Cuts) -> np.ndarray:
    """The part of a whole tensor that a rank holds."""
    dim = layout[name]
    whole_value, place = dense(value), mesh.coordinates(rank)["tp"]
    return whole_value if dim is None else np.array_split(whole_value, mesh.size("tp"), axis=dim)[place]


def mesh_gradients(found: Sequence[Gradients | None], single: Sequence[Gradients], mesh: Mesh, layout: Cuts,
                   num_micro_batches: int) -> float:
    """Every rank must hold its part of the mean of `single`, the gradients of the batch's sequences one by one.

    Returns the sum of the absolute values of the whole gradient. Raises CheckFailed with the likeliest reason.
    """
    found = _all_there(found)
    mean = {name: np.mean([dense(own[name]) for own in single], axis=0) for name in layout}
    scale = whole(mean)
    for rank in reversed(range(len(found))):  # the last stage's mistakes are nearest to the loss
        finite(rank, "the gradients", whole(found[rank]))
        wrong = [name for name, got in found[rank].items()
                 if not agree(got, cut(mean[name], name, rank, mesh, layout), scale)]
        if wrong:
            step = _Step(found, single, mesh, layout, num_micro_batches, scale)
            raise CheckFailed(f"rank {rank} {step.why(rank, wrong)}")
    return magnitude(scale)


class _Step:
    """What one step left on the ranks, and what it could have been."""

    def __init__(self, found: Sequence[Gradients], single: Sequence[Gradients], mesh: Mesh, layout: Cuts,
                 num_micro_batches: int, scale: np.ndarray) -> None:
        self.found, self.single, self.mesh, self.layout = found, single, mesh, layout
        self.num_micro_batches, self.scale = num_micro_batches, scale

    def why(self, rank: int, wrong: Sequence[str]) -> str:
        """What is wrong with the gradients of these names on this rank."""
        split = [name for name in wrong if self.layout[name] is not None]
        kept = [name for name in wrong if self.layout[name] is None]
        names = max((split or kept, kept), key=len) if len(wrong) < len(self.found[rank]) else list(wrong)
        rows, got = self._rows(rank, names), np.concatenate([flat(self.found[rank][name]) for name in names])
        factor, weights = multiples(rows.mean(axis=0, keepdims=True), got), multiples(rows, got)
        if not got.any():
            fault = "it is 0: is it cleared between backward and the optimizer's step?"
        elif factor is not None:
            fault = self._why_times(rank, float(factor[0]), not split and len(wrong) < len(self.found[rank]))
        elif weights is not None:
            fault = self._why_weights(weights)
        elif agree(got, rows.mean(axis=0), self.scale, SIX_DIGITS):
            fault = "it is right to six digits only: has it been float32 on the way?"
        else:
            fault = self._why_mixed(rank, wrong)
        return f"{self._which(rank, wrong)} {fault}"

    def _which(self, rank: int, wrong: Sequence[str]) -> str:
        if len(wrong) == len(self.found[rank]):
            return "has a wrong gradient of all its parameters:"
        return f"has a wrong gradient of {wrong[0]} and {len(wrong) - 1} others:" if len(wrong) > 1 else \
            f"has a wrong gradient of {wrong[0]}:"

    def _rows(self, rank: int, names: Sequence[str]) -> np.ndarray:
        """What each sequence alone gives of these, shape (B, n)."""
        return np.stack([np.concatenate([cut(own[name], name, rank, self.mesh, self.layout).ravel() for name in names])
                         for own in self.single])

    def _why_weights(self, weights: np.ndarray) -> str:
        """What is wrong with the weights (B,) of the sequences in a gradient."""
        absent = np.flatnonzero(is_zero(weights))
        if not len(absent):
            return (f"the sequences weigh between {short(weights.min())} and {short(weights.max())}, and each should "
                    f"weigh 1/{len(weights)}")
        everywhere = set(absent.tolist())
        for rank, own in enumerate(self.found):
            theirs = multiples(self._rows(rank, list(own)), whole(own))
            everywhere &= set() if theirs is None else set(np.flatnonzero(is_zero(theirs)).tolist())
        if everywhere:
            return (f"sequence {listed(sorted(everywhere))} of the batch is in no rank's gradient: each replica takes "
                    "a share of its own, by its dp coordinate")
        return (f"it has nothing of sequence {listed(absent)}, which another replica has: the ranks that hold the same "
                "parameters on other sequences are those of its dp group; average over them")

    def _why_times(self, rank: int, times: float, only_whole: bool) -> str:
        """What a gradient means that is so many times the right one."""
        sizes = {axis: self.mesh.size(axis) for axis in self.mesh.axes}
        if only_whole and np.isclose(times, sizes["tp"]):
            return (f"it is {short(times)} times what it should be. What is not cut is whole on every rank of tp, and "
                    "so is its gradient: the way back into the cut layers has summed it already")
        said = [(self.num_micro_batches, "the gradients of the micro-batches add up, and each is that of a mean: "
                                         f"scale each loss by 1/{self.num_micro_batches}"),
                (sizes["dp"], f"it is the sum over the {sizes['dp']} replicas: take the mean"),
                (1 / self.num_micro_batches, "it is divided by the number of micro-batches twice"),
                (1 / sizes["dp"], "it is divided by the number of replicas twice"),
                (sizes["dp"] / self.mesh.world_size, "it is divided by the number of all ranks: what a dp group adds "
                                                     f"up is the gradients of {sizes['dp']} replicas"),
                (sizes["tp"], "it is summed over tp, where all ranks have the same share"),
                (self.num_micro_batches * sizes["dp"], "it is a sum over micro-batches and replicas: divide by both")]
        fits = [text for factor, text in said if np.isclose(times, factor, rtol=1e-6)]
        why = "; or ".join(dict.fromkeys(fits[:2])) or self._drift(rank) or "by what is it scaled, and how often?"
        return f"it is {short(times)} times what it should be: {why}"

    def _drift(self, rank: int) -> str:
        """What to say where the ranks of tp scale what they hold alike by different factors; nothing if they don't."""
        factors = [self._factor(other) for other in self.mesh.group_of(rank, "tp")]
        if np.allclose(factors, factors[0], rtol=1e-6):
            return ""
        return (f"ranks {listed(self.mesh.group_of(rank, 'tp'))} of one tp group scale theirs by "
                f"{listed(map(short, factors))}. Weights that they hold alike, such as the norms', drift apart: has "
                "each clipped by the norm of its own part?")

    def _factor(self, rank: int) -> float:
        """What multiple of the mean this rank's gradients are; nan if they are none."""
        names = list(self.found[rank])
        factor = multiples(self._rows(rank, names).mean(axis=0, keepdims=True), whole(self.found[rank]))
        return float("nan") if factor is None else float(factor[0])

    def _why_mixed(self, rank: int, wrong: Sequence[str]) -> str:
        """Ranks whose gradients differ in meaning were added up: find the axes over which."""
        # A sum over tp tells nothing of what is not cut: there all its ranks have the same.
        split = [name for name in wrong if self.layout[name] is not None]
        name = max(split or wrong, key=lambda name: flat(self.found[rank][name]).size)
        got = flat(self.found[rank][name])
        for size in (1, 2, 3):
            for axes in combinations(self.mesh.axes, size):
                total = self._added(rank, name, axes)
                times = None if total is None else multiples(total[None], got)
                if times is not None and axes != ("dp",):
                    return (f"that of {name} is {short(times[0])} times a sum over {'+'.join(axes)}, whose ranks hold "
                            "different parameters: average over dp alone")
        return ("it is no sum of its own sequences' gradients: was something else added to it, such as gradients that "
                "were not cleared or those of other parameters? Do all ranks of tp and pp of a replica work on the "
                "same share?")

    def _added(self, rank: int, name: str, axes: tuple[str, ...]) -> np.ndarray | None:
        """What the ranks along these axes have of a parameter before anything is averaged, added up."""
        shares = np.array_split(np.arange(len(self.single)), self.mesh.size("dp"))
        total = np.zeros(flat(self.found[rank][name]).size)
        for other in self.mesh.group_of(rank, *axes):
            if name not in self.found[other]:
                return None
            mean = np.mean([dense(self.single[b][name]) for b in shares[self.mesh.coordinates(other)["dp"]]], axis=0)
            part = cut(mean, name, other, self.mesh, self.layout)
            if part.size != total.size:
                return None
            total = total + part.ravel()
        return total


def _all_there(found: Sequence[Gradients | None]) -> list[Gradients]:
    there = []
    for rank, own in enumerate(found):
        if own is None:
            raise CheckFailed(f"rank {rank}'s optimizer has made no step: step() ends with self.optimizer.step()")
        absent = [name for name, gradient in own.items() if gradient is None]
        if absent:
            what = "any parameter" if len(absent) == len(own) else absent[0]
            raise CheckFailed(f"rank {rank} has no gradient for {what} when the optimizer steps: does the pipeline run "
                              "before, and is nothing cleared after it?")
        there.append(own)
    return there


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
