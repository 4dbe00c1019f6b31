"""L3: a recorded step on a mesh as the small JSON that the mesh explorer draws.

Ranks are named by their numbers in the trace; the script gives them others where the reader reorders the axes.

    axes, shape, per    the mesh as it was recorded: axes from the outermost in, ranks per node; `sizes` to choose from
    names               the axes, and what else is sent along, as book.cost.flows calls it: "dp+tp", "none"
    flows               [name, from, to, bytes in a step]; `span` says that it is one, or the whole run
    sent                what is sent at stops, each [name, [from, to, bytes, from, to, bytes, ...]]
    stops               what is played, each [kind, sentences, work, [what is sent, its label, what is sent, ...]]

A sentence is [what to stress, the rest], with @5 for rank 5; work is a list of [kind of action, micro-batch, ranks];
a label is the action that a message comes from, "F0".
"""
from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from itertools import permutations
from typing import Any

from book.cost import Flows, bytes_across_nodes, bytes_by_axis, flows
from book.mesh import Mesh
from book.trace import Event, Trace
from book.widgets.mesh_steps import Step, Stop
from book.widgets.mesh_words import told


def mesh_payload(trace: Trace, mesh: Mesh, step: Step) -> dict[str, Any]:
    """The mesh, what is sent along its axes, and the stops."""
    sent = step_flows(trace, mesh, step)
    names = [*mesh.axes, *sorted({name for name, _, _ in sent} - set(mesh.axes))]
    per = mesh.ranks_per_node or mesh.world_size
    known: dict[tuple[Any, ...], int] = {}
    stops = [[stop.kind, said, _work(stop), _sent(stop, mesh, names, known)]
             for stop, said in zip(step.stops, told(step, mesh))]
    return {"axes": list(mesh.axes), "shape": list(mesh.shape), "per": per, "sizes": sizes(mesh), "names": names,
            "span": step.span,
            "flows": [[names.index(name), src, dst, short(num_bytes)] for (name, src, dst), num_bytes in sent.items()],
            "sent": [[name, list(moved)] for name, moved in known], "stops": stops}


def step_flows(trace: Trace, mesh: Mesh, step: Step) -> Flows:
    """Bytes from rank to rank by axis in a step: of several, the mean."""
    return {key: num_bytes / step.num_steps for key, num_bytes in sorted(flows(trace, mesh).items())}


def sizes(mesh: Mesh) -> list[int]:
    """Ranks per node to choose from: 1, 2, 4, ..., all of them, and what the mesh has."""
    powers = {2**k for k in range(mesh.world_size.bit_length()) if 2**k < mesh.world_size}
    return sorted(powers | {mesh.world_size, mesh.ranks_per_node or mesh.world_size})


def across(sent: Flows, mesh: Mesh, other: Mesh) -> float:
    """Bytes that would cross nodes if each rank of `mesh` sat at its coordinates on the mesh `other`."""
    placed = [other.rank_at(**mesh.coordinates(rank)) for rank in range(mesh.world_size)]
    moved = {(name, placed[src], placed[dst]): num_bytes for (name, src, dst), num_bytes in sent.items()}
    return sum(bytes_across_nodes(moved, other).values())


def orders(sent: Flows, mesh: Mesh) -> dict[tuple[str, ...], float]:
    """Bytes that cross nodes for each order of the axes, outermost first."""
    return {axes: across(sent, mesh, mesh.with_axes(*axes)) for axes in permutations(mesh.axes)}


def most_sent(sent: Flows, mesh: Mesh) -> dict[str, float]:
    """What the rank that sends most along an axis sends."""
    return {name: float(per_rank.max()) for name, per_rank in bytes_by_axis(sent, mesh.world_size).items()}


def short(num_bytes: float) -> float:
    """A number of bytes with no more digits than it has."""
    return int(num_bytes) if num_bytes == int(num_bytes) else round(num_bytes, 3)


def _work(stop: Stop) -> list[list[Any]]:
    ranks: dict[tuple[str | None, int | None], list[int]] = defaultdict(list)
    for item in stop.items if stop.kind == "work" else ():
        ranks[item.event.op, item.event.micro_batch].append(item.event.rank)
    return [[*what, who] for what, who in ranks.items()]


def _sent(stop: Stop, mesh: Mesh, names: list[str], known: dict[tuple[Any, ...], int]) -> list[Any]:
    """What travels at a stop, by axis and label; most of it has been sent before and is `known`."""
    if stop.kind == "stuck":
        return []
    by_label: dict[str, list[Event]] = defaultdict(list)
    for item in stop.items:
        label = f"{item.made.op}{item.made.micro_batch}" if item.made else ""
        by_label[label] += item.inner if stop.kind == "work" else [item.event]
    found: dict[tuple[int, str], list[float]] = defaultdict(list)
    for label, events in by_label.items():
        for (name, src, dst), num_bytes in _flows(events, mesh):
            found[names.index(name), label] += [src, dst, short(num_bytes)]
    return [part for (name, label), moved in found.items()
            for part in (known.setdefault((name, tuple(moved)), len(known)), label)]


def _flows(events: list[Event], mesh: Mesh) -> Iterable[tuple[tuple[str, int, int], float]]:
    return flows(Trace(events, mesh.world_size, "measured", "recorded"), mesh).items()
