"""L2: what a collective would do on given links.

A rank's link has two directions; each carries one message at a time, in the order of the schedule. A message leaves
when its sender has finished its own earlier steps and both directions are free. There is no barrier: a rank starts step
k when its own step k-1 is done and its input has arrived, whatever the others do. Arrays: R ranks, M messages.
"""
from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from book.columns import Columns, concatenate
from book.cost import Link, Network
from book.schedule import Round, Schedule
from book.simulate.messages import StepMessages, steps
from book.simulate.shared import run_shared
from book.trace import Event, Trace

LARGEST_WATCHED_WORLD = 64  # contributions are one number per event and rank: beyond this they cost gigabytes


def simulate(schedule: Schedule, num_bytes: float, link: Link | Network, *, slowdown: Mapping[int, float] | None = None,
             links: Mapping[tuple[int, int], Link] | None = None, contributions: bool | None = None) -> Trace:
    """The trace that `schedule` leaves on a buffer of `num_bytes` when every rank has the link `link`.

    With a `Network` in place of the link, ranks share their node's cards. `slowdown` maps a rank to the factor (1 =
    normal) by which its transfers and additions take longer; `links` maps (src, dst) to the link between just those
    two. `contributions` says whether events carry whose data is in a chunk (default: up to 64 ranks). Times are
    seconds. Raises ValueError for an impossible rank, factor or size.
    """
    chunk_bytes = chunk_size(schedule, num_bytes)
    start_s, sent_s, done_s = _times(schedule, chunk_bytes, link, factors(schedule.world_size, slowdown or {}),
                                     links or {})
    watched = schedule.world_size <= LARGEST_WATCHED_WORLD if contributions is None else contributions
    events = _events(schedule, chunk_bytes, start_s, sent_s, done_s, watched)
    return Trace(events, schedule.world_size, "modelled", "simulated", name=schedule.name, promise=schedule.promise)


def _times(schedule: Schedule, chunk_bytes: float, link: Link | Network, slowdown: np.ndarray,
           links: Mapping[tuple[int, int], Link]) -> np.ndarray:
    """When each move leaves, has arrived, and has been added: seconds, shape (3, moves)."""
    messages, num_moves = steps(schedule, chunk_bytes), len(schedule.moves)
    if not isinstance(link, Network):
        return _run(messages, num_moves, _Links(schedule.world_size, link, slowdown, links))
    if links:
        raise ValueError("links: a Network says itself which link lies between two ranks; leave `links` out")
    return run_shared(messages, num_moves, link, slowdown)


def chunk_size(schedule: Schedule, num_bytes: float) -> float:
    """The bytes of a chunk where the buffer has `num_bytes`; raises ValueError for an impossible size."""
    if not 0 <= num_bytes < float("inf"):
        raise ValueError(f"num_bytes can't be {num_bytes}: give the buffer's size in bytes")
    return num_bytes / schedule.num_chunks


def factors(world_size: int, slowdown: Mapping[int, float]) -> np.ndarray:
    """Each rank's factor on its times, shape (R,); raises ValueError for an impossible rank or factor."""
    found = np.ones(world_size)
    for rank, factor in slowdown.items():
        if not (0 <= rank < world_size and 0 < factor < float("inf")):
            raise ValueError(f"slowdown: rank {rank} with factor {factor} is not possible: ranks are 0.."
                             f"{world_size - 1} and factors positive")
        found[rank] = factor
    return found


class _Links:
    """How long a message takes from one rank to another; matrices only where links differ."""

    def __init__(self, world_size: int, link: Link, slowdown: np.ndarray, links: Mapping[tuple[int, int], Link]):
        self.slowdown = slowdown
        shape = (world_size, world_size) if links else (1, 1)
        self.latency_s = np.full(shape, float(link.latency_s))
        self.s_per_byte = np.full(shape, 1 / link.bandwidth_bytes_per_s)
        self.reduce_s_per_byte = np.full(shape, float(link.reduce_s_per_byte))
        for (src, dst), own in links.items():
            if not (0 <= src < world_size and 0 <= dst < world_size and src != dst):
                raise ValueError(f"links: ({src}, {dst}) must name two different ranks of 0..{world_size - 1}")
            self.latency_s[src, dst], self.reduce_s_per_byte[src, dst] = own.latency_s, own.reduce_s_per_byte
            self.s_per_byte[src, dst] = 1 / own.bandwidth_bytes_per_s
        self.uniform = not links

    def transfer_s(self, src: np.ndarray, dst: np.ndarray, num_bytes: np.ndarray) -> np.ndarray:
        pair = (0, 0) if self.uniform else (src, dst)
        slower = np.maximum(self.slowdown[src], self.slowdown[dst])
        return (self.latency_s[pair] + num_bytes * self.s_per_byte[pair]) * slower

    def reduce_s(self, src: np.ndarray, dst: np.ndarray, num_bytes: np.ndarray) -> np.ndarray:
        pair = (0, 0) if self.uniform else (src, dst)
        return num_bytes * self.reduce_s_per_byte[pair] * self.slowdown[dst]


@dataclass
class _Clocks:
    """When each rank becomes free, in seconds, shape (R,) each."""

    ready: np.ndarray   # its earlier steps are done
    sending: np.ndarray
    receiving: np.ndarray
    adding: np.ndarray


class _Wave(NamedTuple):
    """Messages of a step that share no sender and no receiver: which these are, and how long each takes."""

    message: np.ndarray
    src: np.ndarray
    dst: np.ndarray
    transfer_s: np.ndarray
    adds: np.ndarray
    reduce_s: np.ndarray


def _run(messages: Iterable[StepMessages], num_moves: int, network: _Links) -> np.ndarray:
    """The same where every rank has a link of its own."""
    times = np.zeros((3, num_moves))
    clocks = _Clocks(*np.zeros((4, len(network.slowdown))))
    for step in messages:
        found = np.zeros((3, len(step.src)))
        waves = _waves(*step[:4], network)
        for wave, of_wave in zip(waves, _advance(waves, clocks)):
            found[:, wave.message] = of_wave
        times[:, step.moves] = found[:, step.message]
    return times


def run_rounds(rounds: Iterable[Round], chunk_bytes: float, link: Link, slowdown: np.ndarray) -> np.ndarray:
    """When each rank has done its part of these rounds, with a link of its own: seconds, shape (R,)."""
    network = _Links(len(slowdown), link, slowdown, {})
    clocks = _Clocks(*np.zeros((4, len(slowdown))))
    for one in rounds:
        waves = _waves(one.src, one.dst, one.num_chunks * chunk_bytes, one.num_added * chunk_bytes, network)
        for _ in range(one.num_steps):
            _advance(waves, clocks)
    return clocks.ready


def _advance(waves: list[_Wave], clocks: _Clocks) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Play a step: when each message of each wave leaves, has arrived, and has been added; advances the clocks."""
    times, done = [], clocks.ready.copy()
    for _, s, d, transfer_s, adds, reduce_s in waves:
        start = np.maximum(clocks.ready[s], np.maximum(clocks.sending[s], clocks.receiving[d]))
        arrived = start + transfer_s
        clocks.sending[s] = clocks.receiving[d] = arrived
        added_at = np.where(adds, np.maximum(arrived, clocks.adding[d]) + reduce_s, arrived)
        clocks.adding[d] = np.maximum(clocks.adding[d], added_at)
        done[s] = np.maximum(done[s], arrived)
        done[d] = np.maximum(done[d], added_at)
        times.append((start, arrived, added_at))
    clocks.ready = done
    return times


def _waves(src: np.ndarray, dst: np.ndarray, num_bytes: np.ndarray, added_bytes: np.ndarray,
           network: _Links) -> list[_Wave]:
    """A step's messages in waves, each after those before it in the schedule."""
    waves, left = [], np.arange(len(src))
    while len(left):
        first = np.zeros(len(left), dtype=int)
        for ports in (src[left], dst[left]):
            first[np.unique(ports, return_index=True)[1]] += 1
        m = left[first == 2]
        s, d = src[m], dst[m]
        waves.append(_Wave(m, s, d, network.transfer_s(s, d, num_bytes[m]), added_bytes[m] > 0,
                           network.reduce_s(s, d, added_bytes[m])))
        left = left[first < 2]
    return waves


def _events(schedule: Schedule, chunk_bytes: float, start_s: np.ndarray, sent_s: np.ndarray, done_s: np.ndarray,
            watched: bool) -> Columns:
    """A send and a recv per move, in the schedule's order; before them, if watched, what every rank holds."""
    moves = schedule.moves
    if not len(moves):
        return _holds(schedule, chunk_bytes) if watched else Columns(Event, {})
    src, dst, chunk, step, op = (moves.array(name) for name in ("src", "dst", "chunk", "step", "op"))
    chunks = _pairs(chunk, schedule.into())
    arrays = {
        "rank": _pairs(src, dst), "peer": _pairs(dst, src), "chunk": chunks, "step": _pairs(step, step),
        "kind": np.tile(np.array([0, 1], dtype=np.int16), len(moves)), "op": _pairs(np.full_like(op, -1), op),
        "num_bytes": np.full(2 * len(moves), float(chunk_bytes)),
        "start_s": _pairs(start_s, start_s), "end_s": _pairs(sent_s, done_s),
    }
    if watched:
        arrays["contributions"] = _contributions(schedule)
    events = Columns(Event, arrays, {"kind": ("send", "recv"), "op": moves.vocabularies["op"]})
    return concatenate([_holds(schedule, chunk_bytes), events]) if watched else events


def _holds(schedule: Schedule, chunk_bytes: float) -> Columns:
    held = schedule.start()
    rank, chunk = (index.ravel().astype(np.int32) for index in np.indices(held.shape[:2]))
    zeros = np.zeros(len(rank))
    arrays: dict[str, np.ndarray] = {
        "rank": rank, "chunk": chunk, "kind": np.zeros(len(rank), dtype=np.int16),
        "step": np.zeros(len(rank), dtype=np.int32), "num_bytes": zeros + chunk_bytes, "start_s": zeros, "end_s": zeros,
        "contributions": held.reshape(len(rank), -1).astype(np.float32)}
    return Columns(Event, arrays, {"kind": ("hold",)})


def _contributions(schedule: Schedule) -> np.ndarray:
    """What was in each message and what the receiver's chunk then held, shape (2 * moves, R)."""
    values = np.zeros((len(schedule.moves), 2, schedule.world_size), dtype=np.float32)
    for rows, sent, held in schedule.replay():
        values[rows, 0], values[rows, 1] = sent, held
    return values.reshape(-1, schedule.world_size)


def _pairs(of_send: np.ndarray, of_recv: np.ndarray) -> np.ndarray:
    """The two columns interleaved: send, recv, send, recv, …"""
    return np.column_stack([of_send, of_recv]).ravel()
