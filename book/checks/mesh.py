"""L3: ranks on a mesh: their coordinates, the groups of each axis, who is in a process group, what crosses nodes."""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import permutations
from typing import Any

from book.checks.verdict import CheckFailed, equal, listed, short
from book.mesh import Mesh
from book.trace import Trace

Message = tuple[str, int, int, float]  # axis, src, dst, bytes


def places(answers: Sequence[Any], mesh: Mesh) -> None:
    """`answers` has by rank what the learner says are its coordinates, in the order of the mesh's axes."""
    for rank, answer in enumerate(answers):
        if not isinstance(answer, tuple) or len(answer) != len(mesh.axes):
            raise CheckFailed(f"place_of({rank}, {mesh.shape}) gives {answer!r}: return a tuple of "
                              f"{len(mesh.axes)} coordinates, {', '.join(mesh.axes)}")
    right = [tuple(mesh.coordinates(rank).values()) for rank in range(mesh.world_size)]
    if list(answers) == right:
        return
    rank = next(rank for rank, (own, want) in enumerate(zip(answers, right)) if own != want)
    raise CheckFailed(f"place_of({rank}, {mesh.shape}) is {right[rank]}, not {answers[rank]}"
                      f"{_why_misplaced(answers, mesh)}")


def groups_of_axis(axis: str, answer: Any, mesh: Mesh) -> int:
    """`answer` must be all groups of an axis, lists of ranks in its order. Returns how many there are."""
    where = f"groups_of({axis!r}, {mesh.shape})"
    if not isinstance(answer, (list, tuple)) or not all(isinstance(group, (list, tuple)) for group in answer):
        raise CheckFailed(f"{where} must be a list with a list of ranks for each group")
    got, want = sorted(tuple(group) for group in answer), sorted(mesh.groups(axis))
    if got == want:
        return len(want)
    if sorted(tuple(sorted(group)) for group in got) == want:
        raise CheckFailed(f"{where}: the groups have the right ranks, but not in the order of their {axis} coordinates")
    for other in mesh.axes:
        if other != axis and got == sorted(mesh.groups(other)):
            raise CheckFailed(f"{where} gives the groups of {other}: the ranks of a group differ in their {axis} "
                              "coordinate, and agree in all others")
    if got and set(got) < set(want):
        raise CheckFailed(f"{where} gives {len(got)} of {len(want)} groups: all of them are asked for, not only those "
                          "that some rank is in")
    raise CheckFailed(f"{where}: {_why_no_group(axis, got, mesh)}")


def same_group(asked: Sequence[Sequence[int] | None]) -> None:
    """`asked` has by rank the group that it makes at one moment with `new_group`: all ranks must make the same."""
    for rank, ranks in enumerate(asked):
        if ranks == asked[0]:
            continue
        who = f"rank 0 makes the group of {_named(asked[0])} while rank {rank} makes that of {_named(ranks)}"
        if all(own is not None and member in own for member, own in enumerate(asked)):
            raise CheckFailed(f"{who}: each makes only the groups that it is in; new_group is a collective of the "
                              "world, so all ranks make all groups")
        raise CheckFailed(f"{who}: the order in which a rank makes the groups must not depend on the rank")


def all_axes(groups: Any, axes: Sequence[str] = ("pp", "dp", "tp")) -> None:
    """`make_groups` must return a dict with a group for each axis."""
    if not isinstance(groups, Mapping):
        raise CheckFailed(f"make_groups must return a dict, axis -> this rank's group, not {type(groups).__name__}")
    for axis in axes:
        if groups.get(axis) is None:
            raise CheckFailed(f"this rank has no group for {axis!r}: new_group gives one to the members; keep that of "
                              f"{', '.join(axes)}, where there is one rank alone too")


def members(found: Sequence[Mapping[str, Sequence[int]]], mesh: Mesh) -> None:
    """`found` has by rank the ranks that it meets in the group of each axis."""
    for rank, own in enumerate(found):
        for axis in mesh.axes:
            want = list(mesh.group_of(rank, axis))
            if list(own[axis]) == want:
                continue
            if not own[axis]:
                raise CheckFailed(f"rank {rank} keeps a group of {axis} that it is not in: keep the one whose ranks "
                                  "have it among them")
            if sorted(own[axis]) == want:
                raise CheckFailed(f"rank {rank}'s group of {axis} has the order {listed(own[axis])}")
            other = "+".join(mesh.axis_of(own[axis]) or ("no axis",))
            raise CheckFailed(f"rank {rank}'s group of {axis} is ranks {listed(own[axis])}, that is {other}: "
                              f"{axis} has ranks {listed(want)}")


def within_groups(trace: Trace, mesh: Mesh, axis: str) -> None:
    """Every collective of the run but a barrier must be over the group that its rank has on this axis."""
    for event in trace.of_kind("collective"):
        if event.op == "barrier" or tuple(sorted(event.group)) == mesh.group_of(event.rank, axis):
            continue
        raise CheckFailed(f"rank {event.rank} calls {event.op} over ranks {listed(sorted(event.group))}: its {axis} "
                          f"group is ranks {listed(mesh.group_of(event.rank, axis))}; give the group to what sends")


def own_pipeline(ranks: Sequence[int], embeds: bool, predicts: bool, rank: int) -> None:
    """A pipeline's ranks must have the rank at its stage's place: first where it embeds, last where it predicts."""
    if rank not in ranks:
        raise CheckFailed(f"rank {rank} is given a pipeline of ranks {listed(ranks)}, which it is not in")
    place = list(ranks).index(rank)
    if (place == 0, place == len(ranks) - 1) != (embeds, predicts):
        raise CheckFailed(f"rank {rank} is number {place} in its pipeline of ranks {listed(ranks)}, but its part of "
                          f"the GPT {_ends(embeds, predicts)}: a pipeline has one rank for each stage, "
                          "and goes along pp")


def crossing(answer: Any, order: Sequence[str], want: Mapping[str, float], total: Mapping[str, float],
             others: Mapping[tuple[str, ...], Mapping[str, float]], messages: Sequence[Message], mesh: Mesh) -> float:
    """`answer` must be the bytes of each axis that cross nodes, where ranks are laid out in this order of the axes.

    `total` is what each axis sends, `others` what other orders would give. `messages` are (axis, src, dst, bytes), and
    `mesh` numbers their ranks. Returns the sum.
    """
    if not isinstance(answer, Mapping) or set(answer) != set(want):
        raise CheckFailed(f"crossing_bytes must return a dict with the bytes of {', '.join(want)}")
    if all(_equal(answer[axis], want[axis]) for axis in want):
        return sum(want.values())
    head = f"with the order {', '.join(order)}, outermost first, "
    if all(_equal(answer[axis], total[axis]) for axis in want):
        raise CheckFailed(f"{head}you count all that is sent: bytes cross where the two ranks sit on different nodes")
    for other, theirs in others.items():
        if all(_equal(answer[axis], theirs[axis]) for axis in want):
            raise CheckFailed(f"{head}your bytes are those of the order {', '.join(other)}: a rank's number grows "
                              "fastest along the last axis")
    theirs = _with_sizes_by_place(messages, mesh, order)
    if all(_equal(answer[axis], theirs[axis]) for axis in want):
        raise CheckFailed(f"{head}you give the sizes of the shape to the axes as they come in the order: sizes belong "
                          "to the axes, not to their place in the order")
    axis = next(axis for axis in want if not _equal(answer[axis], want[axis]))
    raise CheckFailed(f"{head}{axis} has {short(want[axis])} bytes that cross nodes, not {answer[axis]!r}")


def _with_sizes_by_place(messages: Sequence[Message], mesh: Mesh, order: Sequence[str]) -> dict[str, float]:
    """The bytes that would cross if the shape's sizes went to the axes as they come in the order."""
    sizes, crossed = dict(zip(order, mesh.shape)), dict.fromkeys(mesh.axes, 0.0)

    def node_of(rank: int) -> int:
        place, number = mesh.coordinates(rank), 0
        for axis in order:
            number = number * sizes[axis] + place[axis]
        return number // (mesh.ranks_per_node or mesh.world_size)

    for axis, src, dst, num_bytes in messages:
        crossed[axis] += num_bytes * (node_of(src) != node_of(dst))
    return crossed


def _equal(a: Any, b: float) -> bool:
    return isinstance(a, (int, float)) and (equal(a, b) or a == b)


def _ends(embeds: bool, predicts: bool) -> str:
    said = [word for word, is_so in (("embeds", embeds), ("predicts", predicts)) if is_so]
    return " and ".join(said) or "neither embeds nor predicts"


def _named(ranks: Sequence[int] | None) -> str:
    return "all ranks" if ranks is None else f"ranks {listed(ranks)}"


def _why_misplaced(answers: Sequence[tuple[int, ...]], mesh: Mesh) -> str:
    for axes in permutations(mesh.axes):
        other = mesh.with_axes(*axes)
        seen = [other.coordinates(rank) for rank in range(mesh.world_size)]
        if axes == mesh.axes:
            continue
        if list(answers) == [tuple(place[axis] for axis in mesh.axes) for place in seen]:
            return (f": your neighbouring ranks are neighbours along {axes[-1]}, and should be along {mesh.axes[-1]}, "
                    "the last axis" if axes[-1] != mesh.axes[-1] else
                    f": {axes[0]} and {axes[1]} are exchanged; {mesh.axes[0]} is the outermost")
    if list(answers) == [tuple(mesh.coordinates(rank).values())[::-1] for rank in range(mesh.world_size)]:
        return f": the numbers are right, in the reverse order; return {', '.join(mesh.axes)}"
    if len(set(answers)) < mesh.world_size:
        return ": your ranks don't have places of their own. By what is divided, and what is left over?"
    return ""


def _why_no_group(axis: str, got: Sequence[tuple[int, ...]], mesh: Mesh) -> str:
    ranks = sorted(rank for group in got for rank in group)
    if ranks != list(range(mesh.world_size)):
        return f"every rank from 0 to {mesh.world_size - 1} is in exactly one group, you list {listed(ranks) or 'none'}"
    if {len(group) for group in got} != {mesh.size(axis)}:
        return f"a group has {mesh.size(axis)} ranks, one for each {axis} coordinate"
    return f"the ranks {listed(got[0])} differ in more than their {axis} coordinate"
