"""L3: a trace as a player sees it: chunks that travel from step to step, each send matched to its receive."""
from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np

from book.cost import Link
from book.schedule import Schedule
from book.simulate import simulate
from book.trace import Event, Trace

Contributions = tuple[float, ...] | None
LARGEST_WORLD = 64


@dataclass
class Transfer:
    """One chunk on its way: from the send to the receive, if there was one (positions among the played steps)."""

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


@dataclass
class Run:
    """What the player needs of one trace: starting contents, transfers by step, and what ranks changed themselves."""

    world_size: int
    num_chunks: int
    num_steps: int
    transfers: list[Transfer]
    start: dict[tuple[int, int], Contributions] = field(default_factory=dict)
    holds: list[tuple[int, int, int, Contributions]] = field(default_factory=list)  # step, rank, chunk, contents

    def shares(self) -> np.ndarray:
        """Each chunk's share of the buffer, shape (num_chunks,): by its bytes where all are known, else equal."""
        sizes = np.zeros(self.num_chunks)
        for t in self.transfers:
            if t.chunk is not None:
                sizes[t.chunk] = max(sizes[t.chunk], t.num_bytes or 0)
        return sizes / sizes.sum() if sizes.all() else np.full(self.num_chunks, 1 / self.num_chunks)

    def final(self) -> dict[tuple[int, int], Contributions]:
        """What each (rank, chunk) holds at the end."""
        changes = [(step, 1, (rank, chunk), held) for step, rank, chunk, held in self.holds]
        changes += [(t.arrives + 1, 0, (t.dst, t.into), t.after) for t in self.transfers if t.into is not None]
        held = {(r, c): self.start.get((r, c)) for r in range(self.world_size) for c in range(self.num_chunks)}
        held.update((where, contents) for _, _, where, contents in sorted(changes, key=lambda change: change[:2]))
        return held


def as_trace(what: Trace | Schedule) -> Trace:
    """A trace that may be shown: a schedule is simulated without times, a measured trace loses its times.

    Raises TypeError for anything else and ValueError for more ranks than the player can show.
    """
    if isinstance(what, Schedule):
        what = _trace_of(what)
    if not isinstance(what, Trace):
        raise TypeError(f"play() takes a Trace or a Schedule, or a mapping of them, not {type(what).__name__}")
    if what.world_size > LARGEST_WORLD:
        raise ValueError(f"the player shows up to {LARGEST_WORLD} ranks, and this trace has {what.world_size}: "
                         f"plot it, or play fewer ranks")
    return what if what.clock == "modelled" else what.logical()


def read_run(trace: Trace) -> Run:
    """A trace's transfers, matched send to receive, and holds; raises ValueError when it has none to play."""
    events = list(trace.events)
    sends, recvs = ([e for e in events if e.kind == kind and e.peer is not None] for kind in ("send", "recv"))
    if not sends and not recvs:
        raise ValueError("this trace has no chunk that is sent or received: there is nothing to play "
                         "(record=True follows sends and receives of a watched buffer)")
    if any(e.step is None for e in sends + recvs):
        raise ValueError("this trace's sends and receives have no steps: give each event its step")
    steps = sorted({e.step for e in sends + recvs})
    position = {step: i for i, step in enumerate(steps)}
    run = Run(trace.world_size, max(trace.num_chunks, 1), len(steps), [])
    run.transfers = [_transfer(send, recv, position) for send, recv in _pair(sends, recvs)]
    run.transfers.sort(key=lambda t: t.leaves)
    _read_holds(run, [e for e in events if e.kind == "hold" and e.chunk is not None], steps)
    return run


def _trace_of(schedule: Schedule) -> Trace:
    return simulate(schedule, 0, Link(0.0, 1.0), contributions=True).logical()


def _pair(sends: list[Event], recvs: list[Event]) -> Iterable[tuple[Event | None, Event | None]]:
    """Sends with their receives: first those that agree on chunk and step, then in order on each channel."""
    waiting = defaultdict(list)
    for recv in recvs:
        waiting[recv.peer, recv.rank].append(recv)
    pairs, late = [], []
    for send in sends:
        queue = waiting[send.rank, send.peer]
        same = next((r for r in queue if (r.step, r.chunk) == (send.step, send.chunk)), None)
        if same is None:
            late.append(send)
            continue
        queue.remove(same)
        pairs.append((send, same))
    for send in late:
        queue = waiting[send.rank, send.peer]
        pairs.append((send, queue.pop(0) if queue and queue[0].step >= send.step else None))
    return pairs + [(None, recv) for queue in waiting.values() for recv in queue]


def _transfer(send: Event | None, recv: Event | None, position: Mapping[int, int]) -> Transfer:
    if send is None:
        at = position[recv.step]
        return Transfer(recv.peer, recv.rank, recv.chunk, recv.chunk, recv.op, at, at, None, recv.contributions,
                        recv.num_bytes, recv.start_s, recv.end_s)
    t = Transfer(send.rank, send.peer, send.chunk, None, None, position[send.step], None, send.contributions, None,
                 send.num_bytes, send.start_s, send.end_s)
    if recv is not None:
        t.into, t.op, t.arrives, t.after = recv.chunk, recv.op, position[recv.step], recv.contributions
        t.end_s = recv.end_s
        t.chunk = t.into if t.chunk is None else t.chunk
    return t


def _read_holds(run: Run, holds: list[Event], steps: list[int]) -> None:
    for event in holds:
        at = sum(step < event.step for step in steps) if event.step is not None else 0
        where = event.rank, event.chunk
        if at == 0 and where not in run.start:
            run.start[where] = event.contributions
        else:
            run.holds.append((at, *where, event.contributions))
    run.holds.sort(key=lambda hold: hold[:3])
