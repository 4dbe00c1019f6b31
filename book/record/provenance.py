"""L2: work out from snapshots of a watched buffer what messages did to it.

What happened is inferred from the snapshots and the messages alone, never from an expected schedule:

- a receive straight into the buffer replaced the chunks that it covers ("copy");
- a chunk that equals a received message, or the sum of several, was replaced by it ("copy"); one that equals its old
  contents plus messages was added to ("reduce"). If it held nothing before, both are true, and it counts as "copy";
- the same applies if the result was also divided by the number of ranks: a hold with the mean then follows;
- the rank itself made any other change, which is a hold. What can't be decoded is None.

Shapes: C chunks, K lanes (one per rank).
"""
from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

import numpy as np

from book.record.recording import Hold, MessageChunk, Operation
from book.record.snapshots import BufferWatch, Snapshot

MOST_COMBINED = 8  # up to this many waiting messages all combinations are tried, with more only one, two or all of them


@dataclass(frozen=True)
class _Waiting:
    """A chunk of a message that was received outside the buffer and has not been seen in it yet."""

    index: int
    place: int
    num_places: int
    contributions: np.ndarray
    fresh: bool = True  # nothing else has been received into its memory since


def read(watch: BufferWatch, operations: Sequence[Operation],
         position: int) -> tuple[dict[int, tuple[MessageChunk, ...]], list[Hold]]:
    """What each operation, by its index, has done to the watched buffer so far, and what the rank changed by itself.

    `position` is the length of the rank's log. Has no side effects, so it can be called again later.
    """
    completed = {index for index in watch.pending if operations[index].end_ns is not None}
    end = watch.end(position, completed)
    return _SnapshotReader(watch, operations).read([*watch.snapshots, end], completed, watch.pending.keys() - completed)


class _SnapshotReader:
    """Goes through the snapshots of one watch in program order."""

    def __init__(self, watch: BufferWatch, operations: Sequence[Operation]):
        self._watch, self._operations = watch, operations
        self._known = watch.decode(watch.snapshots[0].lanes)
        self._waiting: list[_Waiting] = []
        self._pieces: dict[int, list[MessageChunk]] = {index: [] for index in watch.spans}
        self._holds: list[Hold] = []

    def read(self, snapshots: list[Snapshot], completed: Iterable[int],
             lost: Iterable[int]) -> tuple[dict[int, tuple[MessageChunk, ...]], list[Hold]]:
        """Pieces and holds; `completed` operations are done but were not waited for, `lost` ones may never complete."""
        for chunk in range(self._watch.num_chunks):
            self._hold(chunk, self._known[chunk], snapshots[0])
        for snapshot in snapshots[1:-1]:
            writes = snapshot.what == "wait" and self._operations[snapshot.index].kind != "send"
            spans = self._watch.spans[snapshot.index] if writes else ()
            self._take(snapshot, {span.chunk: snapshot.index for span in spans})
        self._take(snapshots[-1], {span.chunk: index for index in completed for span in self._watch.spans[index]})
        for index in lost:
            self._lose(index, snapshots[-1])
        for message in self._waiting:
            self._forget(message)
        return {index: tuple(pieces) for index, pieces in self._pieces.items()}, self._holds

    def _take(self, snapshot: Snapshot, landed: Mapping[int, int]) -> None:
        """Advance to the next snapshot; `landed` maps each chunk that an operation wrote directly to that operation."""
        now = self._watch.decode(snapshot.lanes)
        busy = sorted(snapshot.in_flight)
        now[busy] = self._known[busy]
        for chunk in np.flatnonzero(self._watch.differ(now, self._known).any(axis=1)).tolist():
            if chunk not in landed:
                self._explain(chunk, now[chunk], snapshot)
            elif self._operations[landed[chunk]].kind == "collective":
                self._hold(chunk, now[chunk], snapshot, landed[chunk])
        self._known = now
        kind = self._operations[snapshot.index].kind if snapshot.index >= 0 else None
        if kind == "recv" and snapshot.what == "wait":
            self._received(snapshot)
        elif kind == "recv":
            self._reuse_memory(snapshot.index)
        elif kind == "send" and snapshot.what == "issue":
            self._pieces[snapshot.index] = list(self._sent_from_buffer(snapshot)) or list(self._sent(snapshot))

    def _lose(self, index: int, snapshot: Snapshot) -> None:
        """Mark the operation's chunks as unknown, since nobody waited for it."""
        unknown = np.full(self._watch.num_lanes, np.nan)
        for span in self._watch.spans[index]:
            if self._operations[index].kind == "recv":
                self._pieces[index].append(MessageChunk(span.chunk, "copy", span.num_bytes, None))
            else:
                self._hold(span.chunk, unknown, snapshot, index)

    def _sent_from_buffer(self, snapshot: Snapshot) -> Iterator[MessageChunk]:
        """Pieces sent straight from the buffer; unknown for part of a chunk and for a chunk being received into."""
        for span in self._watch.spans[snapshot.index]:
            known = span.whole and span.chunk not in snapshot.in_flight
            held = _contributions(self._known[span.chunk]) if known else None
            yield MessageChunk(span.chunk, None, span.num_bytes, held)

    def _received(self, snapshot: Snapshot) -> None:
        for span in self._watch.spans[snapshot.index]:
            held = _contributions(self._known[span.chunk])
            self._pieces[snapshot.index].append(MessageChunk(span.chunk, "copy", span.num_bytes, held))
        if snapshot.message is not None:
            lanes = self._watch.decode(snapshot.message)
            self._waiting += [_Waiting(snapshot.index, place, len(lanes), lanes[place]) for place in range(len(lanes))]

    def _sent(self, snapshot: Snapshot) -> Iterator[MessageChunk]:
        """The chunks of a message from outside the buffer, identified by their contents."""
        if snapshot.message is None:
            return
        lanes = self._watch.decode(snapshot.message)
        num_bytes = self._operations[snapshot.index].num_bytes / len(lanes)
        settled = [chunk for chunk in range(self._watch.num_chunks) if chunk not in snapshot.in_flight]
        for place, held in enumerate(lanes):
            alike = [c for c in settled if held.any() and np.isfinite(held).all()
                     and self._watch.same(self._known[c], held)]
            if len(lanes) == self._watch.num_chunks and place in alike:
                alike = [place]
            chunk = alike[0] if len(alike) == 1 else None
            yield MessageChunk(chunk, None, num_bytes, _contributions(held), tuple(alike))

    def _reuse_memory(self, index: int) -> None:
        """Age messages whose memory is received into again: no longer fresh the first time, forgotten the second."""
        own, kept = self._watch.memory[index], []
        for message in self._waiting:
            if not _overlap(own, self._watch.memory[message.index]):
                kept.append(message)
            elif message.fresh:
                kept.append(replace(message, fresh=False))
            else:
                self._forget(message)
        self._waiting = kept

    def _forget(self, message: _Waiting) -> None:
        num_bytes = self._operations[message.index].num_bytes / message.num_places
        self._pieces[message.index].append(MessageChunk(None, None, num_bytes, None))

    def _hold(self, chunk: int, values: np.ndarray, snapshot: Snapshot, operation: int | None = None) -> None:
        self._holds.append(Hold(chunk, _contributions(values), snapshot.position, snapshot.time_ns, operation))

    def _explain(self, chunk: int, after: np.ndarray, snapshot: Snapshot) -> None:
        fitting = [m for m in self._waiting if m.num_places != self._watch.num_chunks or m.place == chunk]
        for messages in ([m for m in fitting if m.fresh], fitting):
            for divisor in (1, self._watch.num_lanes):
                found = self._cause(self._known[chunk], after * divisor, messages)
                if found:
                    self._apply(chunk, *found)
                    if divisor > 1:
                        self._hold(chunk, after, snapshot)
                    return
        self._hold(chunk, after, snapshot)

    def _cause(self, before: np.ndarray, after: np.ndarray,
               messages: list[_Waiting]) -> tuple[np.ndarray, tuple[_Waiting, ...], int] | None:
        """What the messages were added to (zeros if they replaced it), which messages, and how often each was added."""
        nothing = np.zeros_like(after)
        for chosen in _choices(messages):
            total = sum((m.contributions for m in chosen), nothing)
            for base in (nothing, before):
                if total.any() and np.isfinite(total).all() and self._watch.same(after, base + total):
                    return base, chosen, 1
        for message in messages:
            if message.contributions.any() and self._watch.same(after, before + 2 * message.contributions):
                return before, (message,), 2
        return None

    def _apply(self, chunk: int, base: np.ndarray, messages: tuple[_Waiting, ...], times: int) -> None:
        held = base
        for place, message in enumerate(messages):
            op = "reduce" if base.any() or place else "copy"
            held = held + times * message.contributions
            num_bytes = self._operations[message.index].num_bytes / message.num_places
            self._pieces[message.index].append(MessageChunk(chunk, op, num_bytes, _contributions(held)))
            self._waiting = [other for other in self._waiting if other is not message]


def _choices(messages: list[_Waiting]) -> Iterator[tuple[_Waiting, ...]]:
    """Combinations of messages that may have gone into a chunk together, fewest first, one chunk of each message."""
    sizes = range(1, len(messages) + 1) if len(messages) <= MOST_COMBINED else (1, len(messages), 2)
    for size in sizes:
        for chosen in combinations(messages, size):
            if len({m.index for m in chosen}) == size:
                yield chosen


def _overlap(a: range, b: range) -> bool:
    return a.start < b.stop and b.start < a.stop


def _contributions(values: np.ndarray) -> tuple[float, ...] | None:
    if not np.isfinite(values).all():
        return None
    return tuple(int(v) if v == int(v) else float(v) for v in values)
