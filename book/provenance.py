"""L2: read off a watched buffer what messages did to it.

A watched buffer has `num_chunks` chunks of `world_size` lanes each; rank r's data starts as ones in lane r. Lanes are
looked at whenever the program issues an operation or has waited for one, and at its end. What happened follows from
those looks and from the messages alone, never from a schedule that was expected:

- a receive straight into the buffer replaced the chunks that it covers ("copy");
- a chunk that holds a received message, or the sum of several, was replaced by it; one that holds what it held before
  and a message was added to ("reduce"). Where it held nothing before, both are true, and "copy" is said;
- also when it was divided by the number of ranks in the same breath: then a hold follows that shows the mean;
- any other change the rank made by itself: a hold. What can't be decoded is None.

Shapes: C chunks, K lanes (one per rank), B elements a lane. Tensors are used through their methods only.
"""
from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import TYPE_CHECKING

import numpy as np

from book.happens_before import Hold, Operation, Piece

if TYPE_CHECKING:
    from torch import Tensor

MOST_COMBINED = 8  # up to so many waiting messages every combination of them is tried, beyond only one, two and all
Extremes = tuple["Tensor", "Tensor"]  # a lane's smallest and largest element: equal where the lane is uniform


class WatchError(ValueError):
    """A buffer that can't be watched: it is not made of lanes."""


@dataclass(frozen=True)
class _Span:
    """The part of a message that lies in one chunk of the watched buffer."""

    chunk: int
    num_bytes: int
    whole: bool


@dataclass(frozen=True)
class _Look:
    """The lanes at one entry of the log: which operation it issued or waited for, and what that one's message held."""

    position: int
    time_ns: int
    lanes: Extremes
    in_flight: frozenset[int]  # chunks that a receive may be writing to right now
    what: str  # "issue", "wait" or "end"
    index: int = -1
    message: Extremes | None = None


@dataclass(frozen=True)
class _Waiting:
    """A chunk of a message that has been received somewhere else and has not been seen in the buffer yet."""

    index: int
    place: int
    num_places: int
    contributions: np.ndarray
    fresh: bool = True  # its memory has not been received into again


class Watch:
    """Follows one buffer; `resolution` is the relative precision of its dtype (0 for integers).

    The buffer must be real, contiguous, cut evenly into `num_chunks` chunks of `num_lanes` lanes, and hold in each chunk at
    most one rank's contribution, once; raises WatchError otherwise. A look costs one pass over the buffer.
    """

    def __init__(self, buffer: Tensor, num_chunks: int, num_lanes: int, resolution: float, position: int):
        size = num_chunks * num_lanes if num_chunks > 0 else 0
        even = size and buffer.numel() and buffer.numel() % size == 0
        if not even or not buffer.is_contiguous() or buffer.is_complex():
            raise WatchError(f"can't watch a buffer of {buffer.numel()} elements as {num_chunks} chunks of {num_lanes} "
                             f"lanes: make it with lanes({max(num_chunks, 1)})")
        self.num_chunks, self.num_lanes, self.resolution = num_chunks, num_lanes, resolution
        self._lanes = buffer.detach().view(num_chunks, num_lanes, -1)
        self._chunk_bytes = buffer.numel() // num_chunks * buffer.element_size()
        self._pending: dict[int, frozenset[int]] = {}
        self.spans: dict[int, tuple[_Span, ...]] = {}
        self.memory: dict[int, range] = {}
        self.looks = [self._look("start", position)]
        self._check_start()

    def issued(self, index: int, operation: Operation, tensors: Sequence[Tensor], position: int) -> None:
        """Look before an operation starts: what it sends is what the buffer, or its own tensor, holds now."""
        spans = tuple(span for tensor in tensors for span in self._spans(tensor))
        message = None
        if operation.kind == "send" and not spans:
            message = self._extremes(tensors[0])
        self.looks.append(self._look("issue", position, index, message))
        self.spans[index] = spans
        if operation.kind != "send":
            self._pending[index] = frozenset(span.chunk for span in spans)
        if operation.kind == "recv":
            self.memory[index] = _memory(tensors[0])

    def waited(self, index: int, operation: Operation, tensors: Sequence[Tensor], position: int) -> None:
        """Look when an operation has been waited for."""
        self._pending.pop(index, None)
        message = None
        if operation.kind == "recv" and not self.spans.get(index):
            message = self._extremes(tensors[0])
        self.looks.append(self._look("wait", position, index, message))

    def read(self, operations: Sequence[Operation], position: int) -> tuple[dict[int, tuple[Piece, ...]], list[Hold]]:
        """What each operation did to the buffer, by its index, and what the rank changed by itself, up to now."""
        return _Reader(self, operations).read([*self.looks, self._look("end", position)])

    def decode(self, extremes: Extremes) -> np.ndarray:
        """Lane values of shape (..., K), NaN where a lane is not uniform; within the dtype's resolution whole is whole.
        """
        low, high = (side.double().cpu().numpy() for side in extremes)
        values = np.where(low == high, low, np.nan)
        values[~np.isfinite(values)] = np.nan
        whole = np.round(values)
        return np.where(np.abs(values - whole) <= 4 * self.resolution * np.maximum(1, np.abs(whole)), whole, values)

    def same(self, a: np.ndarray, b: np.ndarray) -> bool:
        """Whether two chunks hold the same, as far as the dtype can tell."""
        return np.allclose(a, b, rtol=4 * self.resolution, atol=4 * self.resolution, equal_nan=True)

    def _check_start(self) -> None:
        start = self.decode(self.looks[0].lanes)
        if not (np.isin(start, (0, 1)).all() and (start.sum(axis=1) <= 1).all()):
            raise WatchError("can't watch this buffer: each chunk must start with 1 in one rank's lane and 0 in the "
                             f"others; make it with lanes({self.num_chunks}) and watch it before it is communicated")

    def _look(self, what: str, position: int, index: int = -1, message: Extremes | None = None) -> _Look:
        in_flight = frozenset().union(*self._pending.values())
        return _Look(position, time.monotonic_ns(), _extremes(self._lanes), in_flight, what, index, message)

    def _extremes(self, tensor: Tensor) -> Extremes | None:
        """The lanes of a tensor outside the buffer, (pieces, K); None when it isn't as long as some whole chunks."""
        length = self._lanes[0].numel()
        if not tensor.numel() or tensor.numel() % length or tensor.is_complex():
            return None
        return _extremes(tensor.detach().reshape(-1, *self._lanes.shape[1:]))

    def _spans(self, tensor: Tensor) -> Iterator[_Span]:
        memory, start = _memory(tensor), self._lanes.data_ptr()
        first, last = memory.start - start, memory.stop - start
        if tensor.device != self._lanes.device or last <= 0 or first >= self._chunk_bytes * self.num_chunks:
            return
        first, last = max(first, 0), min(last, self._chunk_bytes * self.num_chunks)
        for chunk in range(first // self._chunk_bytes, -(-last // self._chunk_bytes)):
            begin = chunk * self._chunk_bytes
            num_bytes = min(last, begin + self._chunk_bytes) - max(first, begin)
            yield _Span(chunk, num_bytes, num_bytes == self._chunk_bytes)


def _extremes(lanes: Tensor) -> Extremes:
    """The smallest and largest element of each lane, shapes (..., K) from (..., K, B)."""
    if lanes.shape[-1] == 1:
        only = lanes[..., 0].clone()
        return only, only
    return lanes.amin(-1), lanes.amax(-1)


def _memory(tensor: Tensor) -> range:
    start = tensor.data_ptr()
    return range(start, start + tensor.numel() * tensor.element_size())


class _Reader:
    """Goes through the looks of one watch in program order."""

    def __init__(self, watch: Watch, operations: Sequence[Operation]):
        self._watch, self._operations = watch, operations
        self._known = watch.decode(watch.looks[0].lanes)
        self._waiting: list[_Waiting] = []
        self._pieces: dict[int, list[Piece]] = {index: [] for index in watch.spans}
        self._holds: list[Hold] = []

    def read(self, looks: list[_Look]) -> tuple[dict[int, tuple[Piece, ...]], list[Hold]]:
        for chunk in range(self._watch.num_chunks):
            self._hold(chunk, self._known[chunk], looks[0])
        for look in looks[1:]:
            self._take(look)
        for message in self._waiting:
            num_bytes = self._operations[message.index].num_bytes / message.num_places
            self._pieces[message.index].append(Piece(None, None, num_bytes, None))
        return {index: tuple(pieces) for index, pieces in self._pieces.items()}, self._holds

    def _take(self, look: _Look) -> None:
        now = self._watch.decode(look.lanes)
        busy = sorted(look.in_flight)
        now[busy] = self._known[busy]
        kind = self._operations[look.index].kind if look.index >= 0 else None
        spans = self._watch.spans.get(look.index, ())
        landed = {span.chunk for span in spans} if look.what == "wait" and kind != "send" else set()
        for chunk in range(self._watch.num_chunks):
            if not self._watch.same(now[chunk], self._known[chunk]):
                if chunk not in landed:
                    self._explain(chunk, now[chunk], look)
                elif kind == "collective":
                    self._hold(chunk, now[chunk], look, look.index)
        self._known = now
        if kind == "recv" and look.what == "wait":
            self._received(look, spans)
        elif kind == "recv":
            self._reuse_memory(look.index)
        elif kind == "send" and look.what == "issue":
            self._pieces[look.index] = [self._covered(span, None) for span in spans] or list(self._sent(look))

    def _received(self, look: _Look, spans: tuple[_Span, ...]) -> None:
        self._pieces[look.index] += [self._covered(span, "copy") for span in spans]
        if look.message is not None:
            lanes = self._watch.decode(look.message)
            self._waiting += [_Waiting(look.index, place, len(lanes), lanes[place]) for place in range(len(lanes))]

    def _covered(self, span: _Span, op: str | None) -> Piece:
        """A sent part of a chunk is not all lanes: unknown. A received one leaves a chunk that may be readable."""
        known = self._known[span.chunk] if span.whole or op else np.full(self._watch.num_lanes, np.nan)
        return Piece(span.chunk, op, span.num_bytes, _contributions(known))

    def _sent(self, look: _Look) -> Iterator[Piece]:
        """The chunks of a message from outside the buffer: which they are is told by what they hold."""
        if look.message is None:
            return
        lanes = self._watch.decode(look.message)
        num_bytes = self._operations[look.index].num_bytes / len(lanes)
        for place, held in enumerate(lanes):
            alike = [c for c in range(self._watch.num_chunks) if held.any() and np.isfinite(held).all()
                     and self._watch.same(self._known[c], held)]
            if len(lanes) == self._watch.num_chunks and place in alike:
                alike = [place]
            yield Piece(alike[0] if len(alike) == 1 else None, None, num_bytes, _contributions(held), tuple(alike))

    def _reuse_memory(self, index: int) -> None:
        """A message whose memory is received into again was used or forgotten; a copy of it may still turn up."""
        own = self._watch.memory[index]
        self._waiting = [replace(m, fresh=m.fresh and not _overlap(own, self._watch.memory[m.index]))
                         for m in self._waiting]

    def _hold(self, chunk: int, values: np.ndarray, look: _Look, operation: int | None = None) -> None:
        self._holds.append(Hold(chunk, _contributions(values), look.position, look.time_ns, operation))

    def _explain(self, chunk: int, after: np.ndarray, look: _Look) -> None:
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
            total = sum(m.contributions for m in chosen)
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
    sizes = range(1, len(messages) + 1) if len(messages) <= MOST_COMBINED else (1, 2, len(messages))
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
