"""L3: a trace as a player sees it: chunks that travel from step to step, each send matched to its receive.

A collective that the library carried out is a step too: which ranks called it, and what their chunks hold afterwards.
The trace does not say how it moved the data, and so the player does not either.
"""
from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np

from book.cost import Link
from book.schedule import Schedule
from book.simulate import simulate
from book.trace import Event, Trace
from book.trace_schema import CellLine


Contributions = tuple[float, ...] | None
State = dict[tuple[int, int], Contributions]  # by (rank, chunk)
Pair = tuple[int, int]  # of ranks
LARGEST_WORLD = 64
T = TypeVar("T")


@dataclass
class Transfer:
    """One chunk in transit, from its send to its receive, if there was one (positions among the played steps)."""

    src: int
    dst: int
    chunk: int | None
    into: int | None = None
    op: str | None = None
    leaves: int = 0
    arrives: int | None = None
    sent: Contributions = None
    after: Contributions = None
    num_bytes: float | None = None
    start_s: float | None = None
    end_s: float | None = None
    line: CellLine | None = None  # that sent it

    def finds_empty(self, held: State) -> bool:
        """Whether it replaces a chunk that is known to hold nothing, given what the chunks hold."""
        before = held.get((self.dst, self.into)) if self.into is not None else None
        return self.op == "copy" and before is not None and not any(before)


@dataclass
class Called:
    """A collective of the ranks in `group`: `ops` says who called what, `changes` if the watched buffer was changed."""

    step: int
    group: tuple[int, ...]
    ops: dict[int, str] = field(default_factory=dict)
    changes: bool = False

    @property
    def missing(self) -> list[int]:
        """The ranks of the group that did not call it."""
        return [rank for rank in self.group if rank not in self.ops]


@dataclass
class ChunkRun:
    """What the player needs from a trace: starting contents, transfers by step, and other changes of contents."""

    world_size: int
    num_chunks: int
    num_steps: int
    transfers: list[Transfer]
    start: State = field(default_factory=dict)
    holds: list[tuple[int, int, int, Contributions]] = field(default_factory=list)  # before which step, rank, chunk
    own: dict[int, set[int]] = field(default_factory=lambda: defaultdict(set))  # by step: who changed its own before it
    calls: list[Called] = field(default_factory=list)
    unmet: dict[int, list[int]] = field(default_factory=dict)  # by step: who waits in a receive where the run hangs
    sizes: dict[int, float] = field(default_factory=dict)  # bytes by chunk, as far as events tell

    @property
    def called(self) -> set[str]:
        """The collectives that ranks called: the trace does not show what these moved."""
        return {op for call in self.calls for op in call.ops.values()} - {"barrier"}

    def shares(self) -> np.ndarray:
        """Each chunk's share of the buffer, shape (num_chunks,): by its bytes if all are known, else equal."""
        total = self.num_bytes()
        if total is None:
            return np.full(self.num_chunks, 1 / self.num_chunks)
        return np.array([self.sizes[chunk] for chunk in range(self.num_chunks)]) / total

    def num_bytes(self) -> float | None:
        """The buffer's bytes; None unless the events tell those of every chunk."""
        return sum(self.sizes.values()) if len(self.sizes) == self.num_chunks else None

    def states(self) -> Iterator[State]:
        """What each (rank, chunk) holds before each step, and finally at the end; one dict, changed in place."""
        changes = [(step, 1, (rank, chunk), held) for step, rank, chunk, held in self.holds]
        changes += [(t.arrives + 1, 0, (t.dst, t.into), t.after) for t in self.transfers
                    if t.into is not None and t.arrives is not None]
        by_step = defaultdict(list)
        for step, _, where, contents in sorted(changes, key=lambda change: change[:2]):
            by_step[step].append((where, contents))
        held = {(r, c): self.start.get((r, c)) for r in range(self.world_size) for c in range(self.num_chunks)}
        for step in range(self.num_steps + 1):
            held.update(by_step[step])
            yield held

    def final(self) -> State:
        """What each (rank, chunk) holds at the end."""
        *_, last = self.states()
        return last


def as_trace(what: Trace | Schedule) -> Trace:
    """A trace that can be shown: a schedule is simulated without times, a measured trace loses its times.

    Raises TypeError for anything else and ValueError for more ranks than the player can show.
    """
    trace = simulate(what, 0, Link(0.0, 1.0), contributions=True) if isinstance(what, Schedule) else what
    if not isinstance(trace, Trace):
        raise TypeError(f"play() takes a Trace or a Schedule, or a mapping of them, not {type(what).__name__}")
    if trace.world_size > LARGEST_WORLD:
        raise ValueError(f"the player shows up to {LARGEST_WORLD} ranks, and this trace has {trace.world_size}: "
                         f"plot it, or play fewer ranks")
    return trace if trace is what and trace.clock == "modelled" else trace.logical()


def read_run(trace: Trace) -> ChunkRun:
    """A trace's transfers, each send matched to its receive, calls and holds; raises ValueError if there are none.

    Collectives count only if a buffer is watched: otherwise nothing is seen to change.
    """
    events = list(trace.events)
    sends, recvs = ([e for e in events if e.kind == kind and e.peer is not None] for kind in ("send", "recv"))
    holds = [e for e in events if e.kind == "hold" and e.chunk is not None]
    calls = [e for e in events if e.kind == "collective"] if holds else []
    played = sends + recvs + calls
    if not played:
        raise ValueError("this trace has no chunk that is sent or received: there is nothing to play (record=True "
                         "follows sends, receives and collectives of a watched buffer: watch(buffer, num_chunks); "
                         "collectives alone are drawn where they have times)")
    if any(e.step is None for e in played):
        raise ValueError("this trace's sends, receives and collectives have no steps: give each event its step")
    steps = sorted({_known(e.step) for e in played})
    position = {step: i for i, step in enumerate(steps)}
    run = ChunkRun(trace.world_size, max(trace.num_chunks, 1), len(steps), [])
    waiting: dict[Pair, list[Event]] = defaultdict(list)
    for recv in recvs:
        waiting[_known(recv.peer), recv.rank].append(recv)
    run.transfers = [_transfer(send, matched, position) for send, matched in _pair(sends, waiting)]
    alone = [recv for queue in waiting.values() for recv in queue]
    if trace.hangs:
        for recv in alone:
            run.unmet.setdefault(position[_known(recv.step)], []).append(recv.rank)
    else:
        run.transfers += [_received(recv, position) for recv in alone]
    run.transfers.sort(key=lambda t: t.leaves)
    for e in holds + sends + recvs:
        if e.chunk is not None and e.num_bytes:
            run.sizes[e.chunk] = max(run.sizes.get(e.chunk, 0), e.num_bytes)
    run.calls = _read_calls(calls, position, {(e.step, e.rank) for e in holds if e.op is not None})
    _read_holds(run, holds, steps)
    return run


def _known(value: T | None) -> T:
    """A field of an event, after `read_run` has checked that the event has it."""
    assert value is not None
    return value


def _received(recv: Event, position: Mapping[int, int]) -> Transfer:
    """The transfer of a receive without a send."""
    at = position[_known(recv.step)]
    return Transfer(_known(recv.peer), recv.rank, recv.chunk, recv.chunk, recv.op, at, at, None, recv.contributions,
                    recv.num_bytes, recv.start_s, recv.end_s)


def _pair(sends: list[Event], waiting: dict[Pair, list[Event]]) -> list[tuple[Event, Event | None]]:
    """Sends with their receives, which are taken out of `waiting`, by (source, destination).

    First those that agree on chunk and step, then in order on each channel.
    """
    pairs: list[tuple[Event, Event | None]] = []
    late = []
    for send in sends:
        queue = waiting.get((send.rank, _known(send.peer)), [])
        same = next((r for r in queue if (r.step, r.chunk) == (send.step, send.chunk)), None)
        if same is None:
            late.append(send)
            continue
        queue.remove(same)
        pairs.append((send, same))
    for send in late:
        queue = waiting.get((send.rank, _known(send.peer)), [])
        follows = queue and _known(queue[0].step) >= _known(send.step)
        pairs.append((send, queue.pop(0) if follows else None))
    return pairs


def _transfer(send: Event, recv: Event | None, position: Mapping[int, int]) -> Transfer:
    t = Transfer(send.rank, _known(send.peer), send.chunk, None, None, position[_known(send.step)], None,
                 send.contributions, None, send.num_bytes, send.start_s, send.end_s, send.line)
    if recv is not None:
        t.into, t.op, t.arrives, t.after = recv.chunk, recv.op, position[_known(recv.step)], recv.contributions
        t.end_s = recv.end_s
        t.chunk = t.into if t.chunk is None else t.chunk
    return t


def _read_calls(events: list[Event], position: Mapping[int, int], changed: set[tuple[int | None, int]]) -> list[Called]:
    calls: dict[tuple[int, tuple[int, ...]], Called] = {}
    for event in events:
        at, group = position[_known(event.step)], event.group or ()
        call = calls.setdefault((at, group), Called(at, group))
        call.ops[event.rank] = event.op or "a collective"
        call.changes |= (event.step, event.rank) in changed
    return sorted(calls.values(), key=lambda call: (call.step, call.group))


def _read_holds(run: ChunkRun, holds: list[Event], steps: list[int]) -> None:
    for event in holds:
        at = sum(step < event.step for step in steps) if event.step is not None else 0
        at += event.op is not None  # a collective changed it: that is seen after the collective's own step
        where = event.rank, _known(event.chunk)
        if at == 0 and where not in run.start:
            run.start[where] = event.contributions
        else:
            run.holds.append((at, *where, event.contributions))
            if event.op is None:
                run.own[at].add(event.rank)
    run.holds.sort(key=lambda hold: hold[:3])


def shape_of(pairs: Iterable[Pair], world_size: int) -> dict[str, Any]:
    """"ring" (only neighbours talk), "tree" (with each rank's depth and place, and a star's hub), else "mesh"."""
    pairs = set(pairs)
    if world_size <= 2 or all((b - a) % world_size in (1, world_size - 1) for a, b in pairs):
        return {"kind": "ring"}
    hubs = set.intersection(*(set(pair) for pair in pairs)) if pairs else set()
    tree = _tree({(min(pair), max(pair)) for pair in pairs}, world_size)
    return {**tree, **({"hub": min(hubs)} if hubs else {})} if tree else {"kind": "mesh"}


def _tree(edges: set[Pair], world_size: int) -> dict[str, Any] | None:
    """Levels below the rank with the most links, leaves side by side; None if the links are not a tree."""
    if len(edges) != world_size - 1:
        return None
    near = defaultdict(list)
    for a, b in sorted(edges):
        near[a].append(b)
        near[b].append(a)
    root = max(range(world_size), key=lambda rank: (len(near[rank]), -rank))
    depth = {root: 0}
    slot: dict[int, float] = {}
    order = _depth_first(near, root, depth)
    leaves = 0
    for rank in reversed(order):  # children come before their parents here
        below = [slot[child] for child in near[rank] if depth[child] == depth[rank] + 1]
        slot[rank] = (min(below) + max(below)) / 2 if below else leaves
        leaves += not below
    if len(order) != world_size:
        return None
    width = max(leaves - 1, 1)
    place = [round(1 - slot[r] / width, 4) if leaves > 1 else 0.5 for r in range(world_size)]
    return {"kind": "tree", "depth": [depth[r] for r in range(world_size)], "slot": place}


def _depth_first(near: dict[int, list[int]], root: int, depth: dict[int, int]) -> list[int]:
    order, todo = [], [root]
    while todo:
        rank = todo.pop()
        order.append(rank)
        for child in reversed(near[rank]):
            if child not in depth:
                depth[child] = depth[rank] + 1
                todo.append(child)
    return order
