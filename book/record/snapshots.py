"""L2: snapshots of a watched buffer while a program runs.

A watched buffer has `num_chunks` chunks of `world_size` lanes each; rank r's data starts as ones in lane r. Whenever
the program issues an operation or has waited for one, the lanes of the buffer and of the message are saved. What they
mean is worked out afterwards (see provenance): a snapshot is one pass over the buffer, and never waits for a GPU.

Shapes: C chunks, K lanes (one per rank), B elements a lane. Tensors are used through their methods only.
"""
from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from book.record.recording import Operation

if TYPE_CHECKING:
    from torch import Tensor

Extremes = tuple["Tensor", "Tensor"]  # a lane's smallest and largest element: equal where the lane is uniform


class WatchError(ValueError):
    """A buffer that can't be watched because it is not made of lanes."""


@dataclass(frozen=True)
class ChunkSpan:
    """The part of a message that lies in one chunk of the watched buffer."""

    chunk: int
    num_bytes: int
    whole: bool


@dataclass(frozen=True)
class Snapshot:
    """The lanes at one entry of the log: which operation was issued or waited for, and what its message held."""

    position: int
    time_ns: int
    lanes: Extremes
    in_flight: frozenset[int]  # chunks that a receive may be writing to right now
    what: str  # "issue", "wait" or "end"
    index: int = -1
    message: Extremes | None = None


class BufferWatch:
    """Follows one buffer; `resolution` is the relative precision of its dtype (0 for integers).

    The buffer must be real and contiguous, divide evenly into `num_chunks` chunks of `num_lanes` lanes, and hold at
    most one rank's contribution, once, in each chunk; raises WatchError otherwise.
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
        self.pending: dict[int, frozenset[int]] = {}
        self.spans: dict[int, tuple[ChunkSpan, ...]] = {}
        self.memory: dict[int, range] = {}
        self.snapshots = [self._snapshot("start", position)]
        self._check_start()

    def issued(self, index: int, operation: Operation, tensors: Sequence[Tensor], position: int) -> None:
        """Take a snapshot before an operation starts, of what it is about to send from the buffer or another tensor."""
        spans = tuple(span for tensor in tensors for span in self._spans(tensor))
        message = None
        if operation.kind == "send" and not spans:
            message = self._extremes(tensors[0])
        self.snapshots.append(self._snapshot("issue", position, index, message))
        self.spans[index] = spans
        if operation.kind != "send":
            self.pending[index] = frozenset(span.chunk for span in spans)
        if operation.kind == "recv":
            self.memory[index] = _memory(tensors[0])

    def withdrawn(self, index: int) -> None:
        """Forget an operation that the backend refused, and its message in the snapshot."""
        self.pending.pop(index, None)
        self.spans.pop(index, None)
        self.memory.pop(index, None)
        self.snapshots = [replace(snapshot, index=-1, message=None) if snapshot.index == index else snapshot
                          for snapshot in self.snapshots]

    def waited(self, index: int, operation: Operation, tensors: Sequence[Tensor], position: int) -> None:
        """Take a snapshot after an operation has been waited for."""
        self.pending.pop(index, None)
        message = None
        if operation.kind == "recv" and not self.spans.get(index):
            message = self._extremes(tensors[0])
        self.snapshots.append(self._snapshot("wait", position, index, message))

    def end(self, position: int, completed: Collection[int]) -> Snapshot:
        """A snapshot of the buffer as it is now; `completed` operations are done, although nobody waited for them."""
        in_flight = (chunks for index, chunks in self.pending.items() if index not in completed)
        return replace(self._snapshot("end", position), in_flight=frozenset().union(*in_flight))

    def decode(self, extremes: Extremes) -> np.ndarray:
        """Lane values of shape (..., K), NaN where a lane is not uniform; near-integers are rounded.

        Near means within the dtype's resolution.
        """
        low, high = (side.double().cpu().numpy() for side in extremes)
        values = np.where(low == high, low, np.nan)
        values[~np.isfinite(values)] = np.nan
        whole = np.round(values)
        return np.where(np.abs(values - whole) <= 4 * self.resolution * np.maximum(1, np.abs(whole)), whole, values)

    def same(self, a: np.ndarray, b: np.ndarray) -> bool:
        """Whether two chunks are equal within the dtype's resolution."""
        return not self.differ(a, b).any()

    def differ(self, a: np.ndarray, b: np.ndarray) -> np.ndarray:
        """Elementwise, which lanes of two chunks, or of two arrays of chunks, differ: booleans of the same shape."""
        near = np.abs(a - b) <= 4 * self.resolution * (1 + np.abs(b))
        return ~(near | (np.isnan(a) & np.isnan(b)))

    def _check_start(self) -> None:
        start = self.decode(self.snapshots[0].lanes)
        if not (np.isin(start, (0, 1)).all() and (start.sum(axis=1) <= 1).all()):
            raise WatchError("can't watch this buffer: each chunk must start with 1 in one rank's lane and 0 in the "
                             f"others; make it with lanes({self.num_chunks}) and watch it before it is communicated")

    def _snapshot(self, what: str, position: int, index: int = -1, message: Extremes | None = None) -> Snapshot:
        in_flight = frozenset().union(*self.pending.values())
        return Snapshot(position, time.monotonic_ns(), _extremes(self._lanes), in_flight, what, index, message)

    def _extremes(self, tensor: Tensor) -> Extremes | None:
        """The lanes of a tensor outside the buffer, (chunks, K); None unless it is a whole number of chunks long."""
        num_places, rest = divmod(tensor.numel(), self._lanes[0].numel())
        if rest or not 0 < num_places <= self.num_chunks or tensor.is_complex():
            return None
        return _extremes(tensor.detach().reshape(-1, *self._lanes.shape[1:]))

    def _spans(self, tensor: Tensor) -> Iterator[ChunkSpan]:
        memory, start = _memory(tensor), self._lanes.data_ptr()
        first, last = max(memory.start - start, 0), min(memory.stop - start, self._chunk_bytes * self.num_chunks)
        if tensor.device != self._lanes.device or first >= last:
            return
        for chunk in range(first // self._chunk_bytes, -(-last // self._chunk_bytes)):
            begin = chunk * self._chunk_bytes
            num_bytes = min(last, begin + self._chunk_bytes) - max(first, begin)
            yield ChunkSpan(chunk, num_bytes, num_bytes == self._chunk_bytes)


def _extremes(lanes: Tensor) -> Extremes:
    """The smallest and largest element of each lane, shapes (..., K) from (..., K, B)."""
    if lanes.shape[-1] == 1:
        only = lanes[..., 0].clone()
        return only, only
    return lanes.amin(-1), lanes.amax(-1)


def _memory(tensor: Tensor) -> range:
    if tensor.is_sparse:
        return range(0)  # stored in several places, none of them part of a buffer
    start = tensor.data_ptr()
    return range(start, start + tensor.numel() * tensor.element_size())
