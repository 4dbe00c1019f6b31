"""L1: bytes that ranks send: by formula, and in a recorded run, axis by axis and link by link.

Everywhere what one rank sends, in one direction, where collectives are as frugal as can be (rings, see `links`).
"""
from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import numpy as np

from book.cost.links import BUS_FACTORS, ring_sent_bytes
from book.mesh import Mesh
from book.trace import Event, Trace

RINGS = ("all_reduce", "reduce_scatter", "all_gather")
Flows = Mapping[tuple[str, int, int], float]


def tensor_parallel_sent_bytes(group_size: int, activation_bytes: float, regather: bool = False) -> float:
    """Bytes that each of t ranks sends in a transformer layer's forward and backward: 8(t-1)/t n.

    n is what goes from layer to layer, s b h numbers. Two all-reduces forward and two backward (shoeybi2019), on
    rings; with sequence parallelism two reduce-scatters and two all-gathers each way, which are as many bytes
    (korthikanti2022). `regather` adds the two all-gathers of inputs that were kept as pieces: 10(t-1)/t n.
    """
    all_gathers = 2 * BUS_FACTORS["all_gather"](group_size) * activation_bytes if regather else 0.0
    return 4 * ring_sent_bytes(group_size, activation_bytes) + all_gathers


def sharded_sent_bytes(zero_stage: int, num_shards: int, num_bytes: float) -> float:
    """Bytes that each rank sends in a training step with sharded state: 2(N-1)/N n in stages 0 to 2, 3(N-1)/N n in 3.

    n is the bytes of all parameters, and of their gradients too. Stage 0 all-reduces the gradients; 1 and 2
    reduce-scatter them and all-gather the parameters; 3 gathers twice, for forward and for backward
    (rajbhandari2020, section 7, which writes N/(N-1) as 1). Raises ValueError for another stage.
    """
    if zero_stage not in range(4):
        raise ValueError(f"there is no ZeRO stage {zero_stage!r}: use 0, 1, 2 or 3")
    num_passes = 3 if zero_stage == 3 else 2
    return num_passes * BUS_FACTORS["all_gather"](num_shards) * num_bytes


def sent_bytes(event: Event) -> float:
    """Bytes that the event's rank sent in it: a message's, or a ring's share of a collective's buffer.

    A barrier has none. Raises ValueError for a collective that is not done in rings.
    """
    if event.kind == "send":
        return event.num_bytes or 0.0
    if event.kind != "collective" or event.op == "barrier":
        return 0.0
    if event.op not in RINGS:
        raise ValueError(f"which rank sends how much in a {event.op} depends on how it is done: count a step that has "
                         f"only messages, {', '.join(RINGS)} (leave the rest out with book.record.paused)")
    return BUS_FACTORS[event.op](len(event.group)) * (event.num_bytes or 0.0)


def flows(trace: Trace, mesh: Mesh) -> Flows:
    """Bytes from rank to rank, by axis: {(axis, src, dst): bytes}; a group of several axes is "dp+tp".

    In a collective each rank sends to the next one of its group, in the order of ranks, and the last to the first.
    A group or message that follows no axis counts as "none". Raises what `sent_bytes` raises, and MeshError for a
    trace with more ranks than the mesh.
    """
    found: Counter[tuple[str, int, int]] = Counter()
    for event in trace.events:
        num_bytes = sent_bytes(event)
        if num_bytes:
            found[_axis(event, mesh), event.rank, _next(event)] += num_bytes
    return dict(found)


def bytes_by_axis(flows: Flows, world_size: int) -> dict[str, np.ndarray]:
    """What each rank sends along each axis, shape (world_size,) for each."""
    found: dict[str, np.ndarray] = {}
    for (axis, src, _), num_bytes in flows.items():
        found.setdefault(axis, np.zeros(world_size))[src] += num_bytes
    return found


def bytes_across_nodes(flows: Flows, mesh: Mesh) -> dict[str, float]:
    """Bytes of each axis that go from one node to another, all ranks together."""
    found = {axis: 0.0 for axis, _, _ in flows}
    for (axis, src, dst), num_bytes in flows.items():
        found[axis] += num_bytes * mesh.crosses((src, dst))
    return found


def _axis(event: Event, mesh: Mesh) -> str:
    """Of a message, the axis along which it goes, whether or not its two ends are the whole group."""
    if event.kind == "collective":
        return "+".join(mesh.axis_of(event.group) or ("none",))
    here, there = mesh.coordinates(event.rank), mesh.coordinates(event.peer)
    moving = [axis for axis in mesh.axes if here[axis] != there[axis]]
    return moving[0] if len(moving) == 1 else "none"


def _next(event: Event) -> int:
    if event.kind == "send":
        return event.peer
    ranks = sorted(event.group)
    return ranks[(ranks.index(event.rank) + 1) % len(ranks)]
