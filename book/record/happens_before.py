"""L2: combine what the ranks' recorders saw into one trace.

A rank's recorder knows the order of its own program: when it issued an operation and when it waited for it. A send
and its matching receive are one message; the ranks' calls of one collective are one operation. An operation comes one
step after the latest operation that any participating rank had waited for before it called this one (Lamport, "Time,
Clocks, and the Ordering of Events", 1978), so steps depend on the program and never on timing.
"""
from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from book.record.recording import Gradient, Hold, MessageChunk, Operation, Origin, Recording
from book.trace import Event, Trace, TraceError

Node = int  # position in the list of messages and collectives


def assemble(recordings: Sequence[Recording | None], backend: str | None = None,
             clock_error_s: float | None = None, hangs: str | None = None) -> Trace:
    """One trace from the recordings of ranks 0, 1, ...; None stands for a rank without a recording.

    `hangs` says which ranks wait for which others in a run that hung.

    Events are sorted by step, then rank, then program order; times start at 0. If all events were emitted, the trace
    has their source, name and promise, as far as these agree. `clock_error_s` says how far off two ranks'
    times may be relative to each other; None means that all have the same clock. Raises TraceError if a message arrives
    before it was sent, which happens when ranks of several hosts were recorded and their clocks were not aligned.
    """
    known = [recording or Recording() for recording in recordings]
    order = _Order(known)
    events = [row for rank, recording in enumerate(known) for row in _events(rank, recording, order)]
    events.sort(key=lambda event: (event.step is None, event.step or 0, event.rank))
    origin = _origin(known)
    if backend != "nccl":  # there a wait returns at once, so a program's times are not those of its messages
        _check_arrivals([*order.messages(), *_emitted_messages(known)], clock_error_s or 0.0)
    return Trace(from_zero(events), len(known), "measured", origin.source, name=origin.name, backend=backend,
                 promise=origin.promise, clock_error_s=clock_error_s, hangs=hangs)


def _check_arrivals(messages: Iterable[tuple[int, int, float, float]], clock_error_s: float) -> None:
    """Raise TraceError if one of these (src, dst, sent_s, arrived_s) arrives before it was sent."""
    for src, dst, sent_s, arrived_s in messages:
        if arrived_s < sent_s - clock_error_s:
            raise TraceError(f"a message arrives at rank {dst} {sent_s - arrived_s:.6f} s before rank {src} sends it: "
                             "do their hosts' clocks differ? Then have each rank call record.save, and make the trace "
                             "with record.merge, which aligns the clocks")


def _emitted_messages(recordings: Sequence[Recording]) -> Iterator[tuple[int, int, float, float]]:
    """Messages that programs emitted themselves, (src, dst, sent_s, arrived_s), matched by their chunk and step."""
    events = [event for recording in recordings for event in recording.emitted
              if event.kind in ("send", "recv") and event.peer is not None and event.chunk is not None]
    sent_s = {(event.rank, event.peer, event.chunk, event.step): event.start_s for event in events
              if event.kind == "send"}
    for event in events:
        start_s = sent_s.get((event.peer or 0, event.rank, event.chunk, event.step))
        if event.kind == "recv" and start_s is not None and event.end_s is not None:
            yield event.peer or 0, event.rank, start_s, event.end_s


def _origin(recordings: Sequence[Recording]) -> Origin:
    """The origin of all events: one schedule, one kind of source, or a recorded program."""
    origins = {origin for recording in recordings for origin in recording.origins}
    if not origins or any(recording.operations or recording.holds for recording in recordings):
        return Origin("recorded")
    if len(origins) == 1:
        return origins.pop()
    sources = {origin.source for origin in origins}
    return Origin(sources.pop() if len(sources) == 1 else "instrumented")


def from_zero(events: Iterable[Event]) -> list[Event]:
    """The events with the earliest start moved to 0 s."""
    events = list(events)
    zero = min((event.start_s for event in events if event.start_s is not None), default=0.0)
    return [replace(event, start_s=_less(event.start_s, zero), end_s=_less(event.end_s, zero)) for event in events]


def _less(time_s: float | None, zero: float) -> float | None:
    return None if time_s is None else time_s - zero


def _events(rank: int, recording: Recording, order: _Order) -> Iterator[Event]:
    """The events of one rank in program order: holds and gradients before the operation that was issued after them."""
    own: defaultdict[int, list[Hold]] = defaultdict(list)  # the rank's own changes, by position
    of_operation: defaultdict[int, list[Hold]] = defaultdict(list)  # a collective's, by operation
    for hold in recording.holds:
        place = own[hold.position] if hold.operation is None else of_operation[hold.operation]
        place.append(hold)
    ready = defaultdict(list)
    for gradient in recording.gradients:
        ready[gradient.position].append(gradient)
    waited = _waited(recording)
    for position in range(len(recording.log) + 1):
        for hold in own.get(position, ()):
            yield _hold_event(rank, hold, order.ready[rank][position])
        for gradient in ready.get(position, ()):
            yield _gradient_event(rank, gradient, order.ready[rank][position])
        if position < len(recording.log) and recording.log[position][0] == "issue":
            index = recording.log[position][1]
            if not recording.operations[index].withdrawn:
                yield from _operation_events(rank, recording, index, order, waited.get(index))
            for hold in of_operation.get(index, ()):
                yield _hold_event(rank, hold, order.level(rank, index), recording.operations[index].op)
    yield from recording.emitted


def _waited(recording: Recording) -> dict[int, int]:
    """How many gradients were ready once the program had waited for each operation; empty if none were followed."""
    positions = [gradient.position for gradient in recording.gradients]  # in order: see `_Recorder.ready`
    return {index: bisect_right(positions, position) for position, (what, index) in enumerate(recording.log)
            if what == "wait" and positions}


def _hold_event(rank: int, hold: Hold, step: int, op: str | None = None) -> Event:
    time_s = hold.time_ns / 1e9
    return Event(rank, "hold", op, chunk=hold.chunk, step=step, start_s=time_s, end_s=time_s,
                 contributions=hold.contributions)


def _gradient_event(rank: int, gradient: Gradient, step: int) -> Event:
    return Event(rank, "compute", gradient.name, step=step, num_bytes=gradient.num_bytes, bucket=gradient.bucket,
                 start_s=gradient.start_ns / 1e9, end_s=gradient.end_ns / 1e9)


def _operation_events(rank: int, recording: Recording, index: int, order: _Order,
                      waited: int | None) -> Iterator[Event]:
    operation, step = recording.operations[index], order.level(rank, index)
    partner = order.partner(rank, index)
    end_ns = operation.end_ns
    if end_ns is None and operation.kind == "send" and partner is not None:
        end_ns = partner.end_ns  # this send was never waited for, but had arrived when its receive ended
    start_s, end_s = operation.start_ns / 1e9, None if end_ns is None else end_ns / 1e9
    if operation.kind == "collective":
        yield Event(rank, "collective", operation.op, group=operation.ranks, num_bytes=operation.num_bytes,
                    bucket=operation.bucket, waited=waited, unit=operation.unit, start_s=start_s, end_s=end_s,
                    step=step, parts=operation.parts)
        return
    for piece in _pieces(operation, partner):
        yield Event(rank, operation.kind, piece.op, peer=operation.peer, chunk=piece.chunk, num_bytes=piece.num_bytes,
                    contributions=piece.contributions, start_s=start_s, end_s=end_s, step=step, line=operation.line)


def _pieces(operation: Operation, partner: Operation | None) -> Iterator[MessageChunk]:
    """The operation's pieces; if the sent data matches several of the sender's chunks, the receiver's chunk decides."""
    num_bytes = operation.num_bytes
    if operation.kind == "recv" and partner is not None:
        num_bytes = min(num_bytes, partner.num_bytes)  # a message may be shorter than its tensor
    pieces = operation.pieces or (MessageChunk(None, None, num_bytes, None),)
    landed = partner.pieces if partner is not None and len(partner.pieces) == len(pieces) else ()
    for place, piece in enumerate(pieces):
        if landed and landed[place].chunk in piece.candidates:
            piece = replace(piece, chunk=landed[place].chunk)
        yield piece


class _Order:
    """Happens-before over all ranks: which calls form one operation, its step, and each rank's step along its log.

    `ready[rank][position]` is the step that an operation issued at that entry of the rank's log would have if only this
    rank mattered.
    """

    def __init__(self, recordings: Sequence[Recording]):
        self._recordings = recordings
        self._node: dict[tuple[int, int], Node] = {}
        self._members: list[list[tuple[int, int]]] = []
        self._earlier: dict[Node, Node] = {}  # the collective before this one in the same group
        self._match_messages()
        self._match_collectives()
        self._level = [0] * len(self._members)
        self._missing = [len(members) for members in self._members]
        self.ready = [[0] for _ in recordings]
        self._walk()

    def level(self, rank: int, index: int) -> int:
        return self._level[self._node[rank, index]]

    def partner(self, rank: int, index: int) -> Operation | None:
        """The other end of a message; None if the peer never made that call, or the operation is a collective."""
        others = [member for member in self._members[self._node[rank, index]] if member != (rank, index)]
        if len(others) != 1 or self._recordings[rank].operations[index].kind == "collective":
            return None
        return self._recordings[others[0][0]].operations[others[0][1]]

    def messages(self) -> Iterator[tuple[int, int, float, float]]:
        """The messages whose ends are both known: (src, dst, sent_s, arrived_s)."""
        for members in self._members:
            ends = {self._recordings[rank].operations[index].kind: (rank, self._recordings[rank].operations[index])
                    for rank, index in members}
            if ends.keys() == {"send", "recv"}:
                (src, send), (dst, recv) = ends["send"], ends["recv"]
                if recv.end_ns is not None:
                    yield src, dst, send.start_ns / 1e9, recv.end_ns / 1e9

    def _operations(self) -> Iterator[tuple[int, int, Operation]]:
        for rank, recording in enumerate(self._recordings):
            for index, operation in enumerate(recording.operations):
                if not operation.withdrawn:
                    yield rank, index, operation

    def _add(self, members: list[tuple[int, int]]) -> Node:
        node = len(self._members)
        self._members.append(members)
        self._node.update(dict.fromkeys(members, node))
        return node

    def _match_messages(self) -> None:
        """Match the k-th send between two ranks with a tag to the k-th such receive: backends preserve that order."""
        ends: dict[tuple[Any, ...], dict[str, list[tuple[int, int]]]] = defaultdict(lambda: {"send": [], "recv": []})
        for rank, index, operation in self._operations():
            if operation.kind in ("send", "recv"):
                src, dst = (rank, operation.peer) if operation.kind == "send" else (operation.peer, rank)
                ends[operation.group, src, dst, operation.tag][operation.kind].append((rank, index))
        for sends, recvs in (both.values() for both in ends.values()):
            num_matched = min(len(sends), len(recvs))
            for k in range(num_matched):
                self._add([sends[k], recvs[k]])
            for alone in sends[num_matched:] + recvs[num_matched:]:
                self._add([alone])

    def _match_collectives(self) -> None:
        """Match the k-th collective of a group on one rank to the k-th on the others, even if they differ."""
        calls: dict[tuple[str, tuple[int, ...]], dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
        for rank, index, operation in self._operations():
            if operation.kind == "collective":
                calls[operation.group, operation.ranks][rank].append(index)
        for by_rank in calls.values():
            nodes = []
            for k in range(max(map(len, by_rank.values()))):
                nodes.append(self._add([(rank, own[k]) for rank, own in by_rank.items() if k < len(own)]))
            self._earlier.update(zip(nodes[1:], nodes))

    def _walk(self) -> None:
        """Go through all logs in parallel; to pass a wait, all members must have made the operation's call."""
        at = [0] * len(self._recordings)
        while any(at[rank] < len(recording.log) for rank, recording in enumerate(self._recordings)):
            moved = [self._advance(rank, at) for rank in range(len(at))]
            if not any(moved):
                self._settle_blocked(at)

    def _advance(self, rank: int, at: list[int]) -> bool:
        start, log, ready = at[rank], self._recordings[rank].log, self.ready[rank]
        while at[rank] < len(log):
            what, index = log[at[rank]]
            node = self._node.get((rank, index))
            if node is None:  # withdrawn
                ready.append(ready[-1])
            elif what == "issue":
                self._issue(node, ready[-1])
                ready.append(ready[-1])
            elif self._missing[node]:
                break
            else:
                ready.append(max(ready[-1], self._level[node] + 1))
            at[rank] += 1
        return at[rank] > start

    def _issue(self, node: Node, ready: int) -> None:
        if not self._missing[node]:
            return  # its level was fixed without this end: see _settle_blocked
        self._level[node] = max(self._level[node], ready)
        self._missing[node] -= 1
        if not self._missing[node] and node in self._earlier:
            self._level[node] = max(self._level[node], self._level[self._earlier[node]] + 1)

    def _settle_blocked(self, at: list[int]) -> None:
        """Fix the levels, as known so far, of waits that returned before the other end was called (crossing sends)."""
        for rank, recording in enumerate(self._recordings):
            if at[rank] < len(recording.log):
                self._missing[self._node[rank, recording.log[at[rank]][1]]] = 0
