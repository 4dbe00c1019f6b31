"""L1: bytes that ranks send: by formula, and in a recorded run, axis by axis and link by link.

Everywhere what one rank sends, in one direction, where collectives are as frugal as can be (rings, see `links`).
"""
from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np

from book.cost.activations import LayerShape
from book.cost.links import ring_sent_bytes
from book.cost.state import check_zero_stage
from book.factors import BUS_FACTORS
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


def num_passes(zero_stage: int, num_micro_batches: Any = 1) -> tuple[Any, Any]:
    """How often a step sends (N-1)/N of all gradients, and of all parameters: 2 and 0, 1 and 1, m and 1, m and 2m.

    Stage 0 all-reduces the gradients; 1 and 2 reduce-scatter them and all-gather the parameters, 2 the gradients of
    each of m micro-batches; 3 gathers twice in each, for forward and for backward (rajbhandari2020, section 7).
    Raises ValueError for another stage.
    """
    check_zero_stage(zero_stage)
    m = num_micro_batches
    return ((2, 0), (1, 1), (m, 1), (m, 2 * m))[zero_stage]


def sharded_sent_bytes(zero_stage: int, num_shards: int, num_bytes: float, num_micro_batches: int = 1) -> float:
    """Bytes that each rank sends in a training step with sharded state: 2(N-1)/N n in stages 0 to 2, 3(N-1)/N n in 3.

    n is the bytes of all parameters, and of their gradients too; with m micro-batches it is (m+1)(N-1)/N n in stage 2,
    3m(N-1)/N n in 3 (`num_passes`). Raises ValueError for another stage.
    """
    return sum(num_passes(zero_stage, num_micro_batches)) * BUS_FACTORS["all_gather"](num_shards) * num_bytes


def replicated_sent_bytes(num_replicas: Any, num_shards: Any, num_bytes: Any) -> Any:
    """Bytes that each rank sends to add the gradients of its shard over replicas of shards: 2(R-1)/R n/N.

    So much more than `sharded_sent_bytes` do N shards send in R replicas (HSDP), after each backward; n is the bytes of
    all parameters.
    """
    return ring_sent_bytes(num_replicas, num_bytes / num_shards)


def pipeline_sends(num_ranks: Any, stages_per_rank: Any = 1) -> tuple[Any, Any]:
    """Messages that a rank of a pipeline sends for one micro-batch: the most that one does, and the mean over ranks.

    Of p v stages p v - 1 send to the next one, which is on another rank, and get a gradient back: 2 (p v - 1)/p on
    average. A rank between others sends 2 v; of two, each lacks one at an end of the model: 2 v - 1. One alone sends
    nothing (derived).
    """
    p, v = num_ranks, stages_per_rank
    return np.where(np.equal(p, 1), 0, 2 * v - np.equal(p, 2)), np.where(np.equal(p, 1), 0, 2 * (p * v - 1) / p)


def context_parallel_sent_bytes(method: str, num_ranks: int, query_bytes: float,
                                key_bytes: float) -> tuple[float, float]:
    """Bytes that each of N ranks sends in one layer's attention, forward and backward, where tokens are cut over ranks.

    q is the bytes of a rank's queries (or outputs), k of its keys (or values). "ring": 2(N-1) k forward; backward
    2(N-1) k for keys and values again, and 2N k for their gradients, which go home (liu2023). "gathered": 2(N-1) k each
    way, by all-gather and reduce-scatter. "ulysses": all-to-alls of queries, keys, values and outputs, 2(N-1)/N (q + k)
    each way (jacobs2023). One rank sends nothing. Raises ValueError for another method.
    """
    n = num_ranks
    if method == "ring":
        return 2 * (n - 1) * key_bytes, (4 * n - 2) * key_bytes if n > 1 else 0
    if method == "gathered":
        return 2 * (n - 1) * key_bytes, 2 * (n - 1) * key_bytes
    if method == "ulysses":
        each_way = 2 * BUS_FACTORS["all_to_all"](n) * (query_bytes + key_bytes)
        return each_way, each_way
    raise ValueError(f"attention can't be {method!r}: use 'ring', 'gathered' or 'ulysses'")


def hybrid_sent_bytes(mesh: Mesh, rank: int, layer: LayerShape, num_layers: int, num_micro_batches: int,
                      parameter_bytes: float, zero_stage: int = 0,
                      bytes_per_number: int = 4) -> dict[str, float]:
    """Bytes that a rank of a mesh (pp, dp, tp) sends along each axis in a step of the book's GPT, with 1F1B or GPipe.

    `layer` is one micro-batch's, n what goes from layer to layer in it, m micro-batches, `parameter_bytes` the rank's.
    tp: m times 8(t-1)/t n in each of the stage's layers, 2(t-1)/t n for the embedding and as much for the head, and
    for the loss three all-reduces of a number of at least 4 bytes for each token. pp: m n to each neighbour. dp:
    2(d-1)/d of the parameters; with ZeRO-2 m+1 and with ZeRO-3 3m times (d-1)/d of them, for each micro-batch has a
    backward of its own (all derived). On a mesh with cp too, `layer` has the tokens of a rank, cp sends what ring
    attention does with 1/t of the heads (`context_parallel_sent_bytes`), m times in each layer of the stage, and what
    dp did goes over both, as "dp+cp". Raises ValueError for another stage of ZeRO, MeshError for an axis that is not
    there.
    """
    num_stages, group_size = mesh.size("pp"), mesh.size("tp")
    stage = mesh.coordinates(rank)["pp"]
    is_first, is_last, m = stage == 0, stage == num_stages - 1, num_micro_batches
    here = num_layers * (stage + 1) // num_stages - num_layers * stage // num_stages
    n = layer.num_activations * bytes_per_number
    tokens = layer.num_sequences * layer.num_tokens * max(4, bytes_per_number)
    ends = (is_first + is_last) * ring_sent_bytes(group_size, n) + is_last * 3 * ring_sent_bytes(group_size, tokens)
    found = Counter({"pp": m * n * (2 - is_first - is_last), "dp": 0.0,
                     "tp": m * (here * tensor_parallel_sent_bytes(group_size, n) + ends)})
    replicas, averaged_over = mesh.size("dp"), "dp"
    if "cp" in mesh.axes:
        heads = n / group_size
        found["cp"] = m * here * sum(context_parallel_sent_bytes("ring", mesh.size("cp"), heads, heads))
        averaged_over = "+".join(axis for axis in mesh.axes if axis in ("dp", "cp") and mesh.size(axis) > 1) or "dp"
        replicas *= mesh.size("cp")
    found[averaged_over] += sharded_sent_bytes(zero_stage, replicas, parameter_bytes, m)
    return dict(found)


def sent_bytes(event: Event) -> float:
    """Bytes that the event's rank sent in it: a message's, a ring's share of a collective's buffer, or what others get.

    The last is an all-to-all's, whose parts are all different. A barrier has none. Raises ValueError for a collective
    that is neither an all-to-all nor done in rings.
    """
    if event.kind == "collective" and event.op not in (*RINGS, "all_to_all", "barrier"):
        raise ValueError(f"which rank sends how much in a {event.op} depends on how it is done: count a step that has "
                         f"only messages, {', '.join(RINGS)}, all_to_all (leave the rest out with book.record.paused)")
    return event.sent_bytes


def axis_name(event: Event, mesh: Mesh) -> str:
    """The axis along which a message goes, or the axes of a collective's group: "tp", "dp+tp", "none".

    A message goes along the one axis in which its two ends differ, whether or not they are the whole group.
    """
    if event.kind == "collective":
        return "+".join(mesh.axis_of(event.group) or ("none",))
    here, there = mesh.coordinates(event.rank), mesh.coordinates(event.peer)
    moving = [axis for axis in mesh.axes if here[axis] != there[axis]]
    return moving[0] if len(moving) == 1 else "none"


def flows(trace: Trace, mesh: Mesh) -> Flows:
    """Bytes from rank to rank, by axis as `axis_name` has it: {(axis, src, dst): bytes}.

    In a collective each rank sends to the next one of its group, in the order of ranks, and the last to the first; in
    an all-to-all each sends to all others. Raises what `sent_bytes` raises, and MeshError for a trace with more ranks
    than the mesh.
    """
    found: Counter[tuple[str, int, int]] = Counter()
    for event in trace.events:
        is_exchange = event.kind == "collective" and event.op == "all_to_all"
        for peer, num_bytes in (event.parts_by_rank if is_exchange else {_next(event): sent_bytes(event)}).items():
            if num_bytes:
                found[axis_name(event, mesh), event.rank, peer] += num_bytes
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


def _next(event: Event) -> int | None:
    if event.kind != "collective":
        return event.peer
    ranks = sorted(event.group)
    return ranks[(ranks.index(event.rank) + 1) % len(ranks)]
