"""L3, lab 7: ranks on a mesh: their coordinates, the groups of each axis, who is in a group, what crosses nodes."""
from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import permutations
from typing import Any

from book.checks.formula import Formula
from book.checks.verdict import CheckFailed, equal, refuse, require, short
from book.mesh import AXES, Mesh
from book.trace import Trace
from book.words import listed

Message = tuple[str, int, int, float]  # axis, src, dst, bytes


def places(answers: Sequence[Any], mesh: Mesh) -> None:
    """`answers`, by rank, must be its coordinates in the order of the mesh's axes."""
    for rank, answer in enumerate(answers):
        require(isinstance(answer, tuple) and len(answer) == len(mesh.axes), f"place_of({rank}, {mesh.shape}) gives "
                f"{answer!r}: return a tuple of {len(mesh.axes)} coordinates, {', '.join(mesh.axes)}")
    for rank, answer in enumerate(answers):
        want = tuple(mesh.coordinates(rank).values())
        if answer != want:
            raise CheckFailed(f"place_of({rank}, {mesh.shape}) is {want}, not {answer}{_why_misplaced(answers, mesh)}")


def groups_of_axis(axis: str, answer: Any, mesh: Mesh) -> int:
    """`answer` must be all groups of an axis, lists of ranks in its order. Returns how many there are."""
    where = f"groups_of({axis!r}, {mesh.shape})"
    require(isinstance(answer, (list, tuple)) and all(isinstance(group, (list, tuple)) for group in answer),
            f"{where} must be a list with a list of ranks for each group")
    got, want = sorted(tuple(group) for group in answer), sorted(mesh.groups(axis))
    if got == want:
        return len(want)
    refuse(sorted(tuple(sorted(group)) for group in got) == want,
           f"{where}: the groups have the right ranks, but not in the order of their {axis} coordinates")
    for other in mesh.axes:
        refuse(other != axis and got == sorted(mesh.groups(other)), f"{where} gives the groups of {other}: the ranks "
               f"of a group must differ in their {axis} coordinate and agree in all others")
    refuse(got and set(got) < set(want), f"{where} gives {len(got)} of {len(want)} groups: return all of them, not "
           "only those that one rank is in")
    ranks = sorted(rank for group in got for rank in group)
    require(ranks == list(range(mesh.world_size)), f"{where}: every rank from 0 to {mesh.world_size - 1} must be in "
            f"exactly one group, but you list {listed(ranks) or 'none'}")
    require({len(group) for group in got} == {mesh.size(axis)},
            f"{where}: a group must have {mesh.size(axis)} ranks, one for each {axis} coordinate")
    wrong = next(group for group in got if tuple(sorted(group)) not in want)
    raise CheckFailed(f"{where}: the ranks {listed(wrong)} differ in more than their {axis} coordinate")


def same_group(asked: Sequence[Sequence[int] | None]) -> None:
    """All ranks must make the same group in the same call of `new_group`; `asked` has, by rank, the group's ranks."""
    for rank, ranks in enumerate(asked):
        strange = [member for member in ranks or () if member not in range(len(asked))]
        refuse(strange, f"rank {rank} makes a group with rank {listed(strange[:1])}, but the ranks are whole numbers "
               f"from 0 to {len(asked) - 1}")
    names = ["all ranks" if ranks is None else f"ranks {listed(ranks)}" for ranks in asked]
    only_own = all(ranks is not None and rank in ranks for rank, ranks in enumerate(asked))
    why = ("each makes only its own groups, but new_group is a collective of the whole world, so all ranks must make "
           "all groups, in the same order" if only_own else
           "the order in which a rank makes the groups must not depend on the rank")
    for rank, name in enumerate(names):
        require(name == names[0], f"rank 0 makes the group of {names[0]} while rank {rank} makes that of {name}: {why}")


def all_axes(groups: Any) -> None:
    """`make_groups` must return a dict with a group for each axis."""
    require(isinstance(groups, Mapping),
            f"make_groups must return a dict, axis -> this rank's group, not {type(groups).__name__}")
    for axis in AXES:
        require(groups.get(axis) is not None, f"this rank has no group for {axis!r}: keep the group of each of "
                f"{', '.join(AXES)} that this rank is a member of, even if it is the only member")
        refuse(isinstance(groups[axis], (list, tuple)), f"what you keep for {axis!r} is a list of ranks: keep what "
               "dist.new_group(ranks) returns")


def members(found: Sequence[Mapping[str, Sequence[int]]], mesh: Mesh) -> None:
    """Every rank must be in the right groups; `found` has, by rank and axis, the ranks of its group."""
    for rank, axis in ((rank, axis) for rank in range(len(found)) for axis in mesh.axes):
        own, want = list(found[rank][axis]), list(mesh.group_of(rank, axis))
        require(own, f"rank {rank} keeps a group of {axis} that it is not in: keep the one that it is a member of")
        refuse(own != want and sorted(own) == want, f"rank {rank}'s group of {axis} has the order {listed(own)}")
        if own != want:
            raise CheckFailed(f"rank {rank}'s group of {axis} has the ranks {listed(own)}, which lie along "
                              f"{'+'.join(mesh.axis_of(own) or ('no axis',))}, but it should have {listed(want)}")


def within_groups(trace: Trace, mesh: Mesh, axis: str) -> None:
    """Every collective of the run, except barriers, must be over the group that its rank has on this axis."""
    for event in trace.of_kind("collective"):
        group, want = tuple(sorted(event.group or ())), mesh.group_of(event.rank, axis)
        refuse(event.op != "barrier" and group != want, f"rank {event.rank} calls {event.op} over ranks "
               f"{listed(group)}, but its {axis} group has ranks {listed(want)}: pass the group to every function that "
               "communicates")


def own_pipeline(ranks: Sequence[int], embeds: bool, predicts: bool, rank: int) -> None:
    """The rank must be at its stage's place among the pipeline's ranks: first if it embeds, last if it predicts."""
    require(rank in ranks, f"rank {rank} gets a pipeline of ranks {listed(ranks)}, which it is not in")
    place = list(ranks).index(rank)
    ends = " and ".join(["embeds"] * embeds + ["predicts"] * predicts) or "neither embeds nor predicts"
    require((place == 0, place == len(ranks) - 1) == (embeds, predicts), f"rank {rank} is number {place} in its "
            f"pipeline of ranks {listed(ranks)}, but its part of the GPT {ends}: a pipeline has one rank for each "
            "stage, along pp")


def crossing(answer: Any, order: Sequence[str], want: Mapping[str, float], total: Mapping[str, float],
             others: Mapping[tuple[str, ...], Mapping[str, float]], messages: Sequence[Message], mesh: Mesh) -> float:
    """`answer` must be the bytes of each axis that cross between nodes if ranks are laid out in this order of the axes.

    `total` is what each axis sends, `others` what other orders would give. `messages` are (axis, src, dst, bytes), with
    ranks as `mesh` numbers them. Returns the sum.
    """
    require(isinstance(answer, Mapping) and set(answer) == set(want),
            f"crossing_bytes must return a dict with the bytes of {', '.join(want)}")
    wrong = [axis for axis in want if not _equal(answer[axis], want[axis])]
    if not wrong:
        return sum(want.values())
    slips = [
        (total, "you count everything that is sent, but bytes cross only between ranks on different nodes"),
        *((theirs, f"your bytes are those of the order {', '.join(other)}: a rank's number grows fastest along the "
           "last axis") for other, theirs in others.items()),
        (_with_sizes_by_place(messages, mesh, order), "you assign the sizes of the shape in the order of the axes "
         "given, but each size belongs to its axis, wherever that stands in the order"),
        (_with_ranks_of_the_order(messages, mesh, order), "you read the ranks of a message as if they were numbered in "
         f"this order already: find a rank's place in the order {', '.join(mesh.axes)} first, then number that place "
         "in the order given")]
    axis = wrong[0]
    formula = Formula(want, slips, lambda got, value: all(_equal(got[axis], value[axis]) for axis in want))
    raise CheckFailed(f"with the order {', '.join(order)}, outermost first, " + formula.explain(
        answer, f"{axis} has {short(want[axis])} bytes that cross between nodes, not {answer[axis]!r}"))


def _with_sizes_by_place(messages: Sequence[Message], mesh: Mesh, order: Sequence[str]) -> dict[str, float]:
    """The bytes that would cross if the shape's sizes were assigned in the order of the axes given."""
    sizes = dict(zip(order, mesh.shape))

    def renumbered(rank: int) -> int:
        place, number = mesh.coordinates(rank), 0
        for axis in order:
            number = number * sizes[axis] + place[axis]
        return number

    return _crossed(messages, mesh, renumbered)


def _with_ranks_of_the_order(messages: Sequence[Message], mesh: Mesh, order: Sequence[str]) -> dict[str, float]:
    """The bytes that would cross if ranks were renumbered from this order of the axes to the mesh's, not back."""
    other = mesh.with_axes(*order)
    return _crossed(messages, mesh, lambda rank: mesh.rank_at(**other.coordinates(rank)))


def _crossed(messages: Sequence[Message], mesh: Mesh, renumbered: Callable[[int], int]) -> dict[str, float]:
    """The bytes that cross between nodes if each rank had the number that `renumbered` gives it."""
    crossed, size = dict.fromkeys(mesh.axes, 0.0), mesh.ranks_per_node or mesh.world_size
    for axis, src, dst, num_bytes in messages:
        crossed[axis] += num_bytes * (renumbered(src) // size != renumbered(dst) // size)
    return crossed


def _equal(a: Any, b: float) -> bool:
    return isinstance(a, (int, float)) and (equal(a, b) or a == b)


def _why_misplaced(answers: Sequence[tuple[int, ...]], mesh: Mesh) -> str:
    right = [mesh.coordinates(rank) for rank in range(mesh.world_size)]
    for axes in permutations(mesh.axes):
        other = mesh.with_axes(*axes)
        seen = [other.coordinates(rank) for rank in range(mesh.world_size)]
        if axes != mesh.axes and list(answers) == [tuple(place[axis] for axis in mesh.axes) for place in seen]:
            return (f": your neighbouring ranks are neighbours along {axes[-1]}, but should be along {mesh.axes[-1]}, "
                    "the last axis" if axes[-1] != mesh.axes[-1] else
                    f": {axes[0]} and {axes[1]} are exchanged; {mesh.axes[0]} is the outermost")
    if list(answers) == [tuple(place.values())[::-1] for place in right]:
        return f": the numbers are right, but in reverse order; return {', '.join(mesh.axes)}"
    if len(set(answers)) < mesh.world_size:
        return ": several ranks get the same place. What do you divide by, and what is the remainder?"
    return ""
