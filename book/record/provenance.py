"""L2: read off the looks at a watched buffer what messages did to it.

What happened follows from the looks and from the messages alone, never from a schedule that was expected:

- a receive straight into the buffer replaced the chunks that it covers ("copy");
- a chunk that holds a received message, or the sum of several, was replaced by it; one that holds what it held before
  and a message was added to ("reduce"). Where it held nothing before, both are true, and "copy" is said;
- also when it was divided by the number of ranks in the same breath: then a hold follows that shows the mean;
- any other change the rank made by itself: a hold. What can't be decoded is None.

Shapes: C chunks, K lanes (one per rank).
"""
from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

import numpy as np

from book.record.looks import Look, Watch
from book.record.recording import Hold, Operation, Piece

MOST_COMBINED = 8  # up to so many waiting messages every combination of them is tried, beyond only one, two and all


@dataclass(frozen=True)
class _Waiting:
    """A chunk of a message that has been received somewhere else and has not been seen in the buffer yet."""

    index: int
    place: int
    num_places: int
    contributions: np.ndarray
    fresh: bool = True  # its memory has not been received into again


def read(watch: Watch, operations: Sequence[Operation],
         position: int) -> tuple[dict[int, tuple[Piece, ...]], list[Hold]]:
    """What each operation did to the watched buffer, by its index, and what the rank changed by itself, up to now.

    `position` is the length of the rank's log. Changes nothing, so that it can be asked again later.
    """
    completed = {index for index in watch.pending if operations[index].end_ns is not None}
    end = watch.end(position, completed)
    return _Reader(watch, operations).read([*watch.looks, end], completed, watch.pending.keys() - completed)


class _Reader:
    """Goes through the looks of one watch in program order."""

    def __init__(self, watch: Watch, operations: Sequence[Operation]):
        self._watch, self._operations = watch, operations
        self._known = watch.decode(watch.looks[0].lanes)
        self._waiting: list[_Waiting] = []
        self._pieces: dict[int, list[Piece]] = {index: [] for index in watch.spans}
        self._holds: list[Hold] = []

    def read(self, looks: list[Look], completed: Iterable[int],
             lost: Iterable[int]) -> tuple[dict[int, tuple[Piece, ...]], list[Hold]]:
        """`completed` operations on the buffer are done but were not waited for; `lost` may be under way for ever."""
        for chunk in range(self._watch.num_chunks):
            self._hold(chunk, self._known[chunk], looks[0])
        for look in looks[1:-1]:
            writes = look.what == "wait" and self._operations[look.index].kind != "send"
            spans = self._watch.spans[look.index] if writes else ()
            self._take(look, {span.chunk: look.index for span in spans})
        self._take(looks[-1], {span.chunk: index for index in completed for span in self._watch.spans[index]})
        for index in lost:
            self._lose(index, looks[-1])
        for message in self._waiting:
            self._forget(message)
        return {index: tuple(pieces) for index, pieces in self._pieces.items()}, self._holds

    def _take(self, look: Look, landed: Mapping[int, int]) -> None:
        """Go on to a look; `landed` are the chunks that an operation wrote to by itself, and which operation."""
        now = self._watch.decode(look.lanes)
        busy = sorted(look.in_flight)
        now[busy] = self._known[busy]
        for chunk in np.flatnonzero(self._watch.differ(now, self._known).any(axis=1)).tolist():
            if chunk not in landed:
                self._explain(chunk, now[chunk], look)
            elif self._operations[landed[chunk]].kind == "collective":
                self._hold(chunk, now[chunk], look, landed[chunk])
        self._known = now
        kind = self._operations[look.index].kind if look.index >= 0 else None
        if kind == "recv" and look.what == "wait":
            self._received(look)
        elif kind == "recv":
            self._reuse_memory(look.index)
        elif kind == "send" and look.what == "issue":
            self._pieces[look.index] = list(self._sent_from_buffer(look)) or list(self._sent(look))

    def _lose(self, index: int, look: Look) -> None:
        """Nobody waited for it: what its chunks hold now is unknown."""
        unknown = np.full(self._watch.num_lanes, np.nan)
        for span in self._watch.spans[index]:
            if self._operations[index].kind == "recv":
                self._pieces[index].append(Piece(span.chunk, "copy", span.num_bytes, None))
            else:
                self._hold(span.chunk, unknown, look, index)

    def _sent_from_buffer(self, look: Look) -> Iterator[Piece]:
        """A part of a chunk is not all lanes, and a chunk under way to here is not settled: both are unknown."""
        for span in self._watch.spans[look.index]:
            known = span.whole and span.chunk not in look.in_flight
            yield Piece(span.chunk, None, span.num_bytes, _contributions(self._known[span.chunk]) if known else None)

    def _received(self, look: Look) -> None:
        for span in self._watch.spans[look.index]:
            held = _contributions(self._known[span.chunk])
            self._pieces[look.index].append(Piece(span.chunk, "copy", span.num_bytes, held))
        if look.message is not None:
            lanes = self._watch.decode(look.message)
            self._waiting += [_Waiting(look.index, place, len(lanes), lanes[place]) for place in range(len(lanes))]

    def _sent(self, look: Look) -> Iterator[Piece]:
        """The chunks of a message from outside the buffer: which they are is told by what they hold."""
        if look.message is None:
            return
        lanes = self._watch.decode(look.message)
        num_bytes = self._operations[look.index].num_bytes / len(lanes)
        settled = [chunk for chunk in range(self._watch.num_chunks) if chunk not in look.in_flight]
        for place, held in enumerate(lanes):
            alike = [c for c in settled if held.any() and np.isfinite(held).all()
                     and self._watch.same(self._known[c], held)]
            if len(lanes) == self._watch.num_chunks and place in alike:
                alike = [place]
            yield Piece(alike[0] if len(alike) == 1 else None, None, num_bytes, _contributions(held), tuple(alike))

    def _reuse_memory(self, index: int) -> None:
        """A message whose memory is received into again was used or forgotten; once more, and no copy is expected."""
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
        self._pieces[message.index].append(Piece(None, None, num_bytes, None))

    def _hold(self, chunk: int, values: np.ndarray, look: Look, operation: int | None = None) -> None:
        self._holds.append(Hold(chunk, _contributions(values), look.position, look.time_ns, operation))

    def _explain(self, chunk: int, after: np.ndarray, look: Look) -> None:
        fitting = [m for m in self._waiting if m.num_places != self._watch.num_chunks or m.place == chunk]
        for messages in ([m for m in fitting if m.fresh], fitting):
            for divisor in (1, self._watch.num_lanes):
                found = self._cause(self._known[chunk], after * divisor, messages)
                if found:
                    self._apply(chunk, *found)
                    if divisor > 1:
                        self._hold(chunk, after, look)
                    return
        self._hold(chunk, after, look)

    def _cause(self, before: np.ndarray, after: np.ndarray,
               messages: list[_Waiting]) -> tuple[np.ndarray, tuple[_Waiting, ...], int] | None:
        """What the messages were added to (zeros: they replaced it), which they are, and how often each was added."""
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
            self._pieces[message.index].append(Piece(chunk, op, num_bytes, _contributions(held)))
            self._waiting = [other for other in self._waiting if other is not message]


def _choices(messages: list[_Waiting]) -> Iterator[tuple[_Waiting, ...]]:
    """Combinations of messages that may have gone into a chunk together, few before many, at most one of each kind."""
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
