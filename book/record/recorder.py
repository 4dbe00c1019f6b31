"""L2: record what a torch.distributed program does, whatever issues its operations.

After `start()` each operation that book.tap sees is recorded, with times of CLOCK_MONOTONIC, which all ranks of a
machine share. `watch(buffer, num_chunks)` adds what was in the messages (see snapshots and
provenance). `collect()` returns what a rank saw; `assemble` (see happens_before) makes the trace.

On a GPU a wait orders the stream and returns at once, so end times are those of the program, not of the transfer (but
see backward).
"""
from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Protocol

import torch
import torch.distributed as dist

from book import tap
from book.device import message_device
from book.record.provenance import read
from book.record.recording import Gradient, Operation, Origin, Recording
from book.record.snapshots import BufferWatch, WatchError
from book.tap import Op
from book.trace import Event
from book.trace_schema import CellLine

_recorder: _Recorder | None = None


class Follower(Protocol):
    """An object that follows a backward pass; called under the recorder's lock, so it must not call the recorder."""

    def issued(self, index: int, operation: Operation, tensors: Sequence[torch.Tensor]) -> tuple[int | None, list[int]]:
        """The bucket that an operation carries and the positions of the gradients in it; (None, []) if unknown."""

    def completed(self, index: int) -> None:
        """Note that an operation has completed; called by the thread that notices it, perhaps more than once."""


class _Thread(threading.local):
    """State of a single thread."""

    paused = False
    unit: str | None = None


_thread = _Thread()


def start(line: Callable[[Sequence[torch.Tensor]], CellLine | None] | None = None) -> None:
    """Record this process from now on: call it in a rank before `dist.init_process_group()`.

    `line(tensors)` says of each send of these which line of the reader's code it is, if that is known.
    """
    recorder = _get_recorder()
    recorder.started, recorder.line = True, line
    tap.start()
    tap.subscribe(recorder)


def collect() -> Recording | None:
    """What this rank has done so far, small and picklable; None if nothing was recorded.

    May be called from another thread while the program hangs, and more than once.
    """
    return _recorder.collect() if _recorder else None


def current() -> _Recorder | None:
    """The recorder of this process, or None when its operations are not recorded."""
    return _recorder if _recorder and _recorder.started else None


def emit(*events: Event, source: str = "instrumented", name: str | None = None, num_steps: int = 0,
         promise: str | None = None) -> None:
    """Add events that the program itself creates; times in seconds of `time.monotonic()`.

    For code that moves data without process groups (threads, RPC) and for `execute`, whose `source` is "executed".
    `num_steps` is added to the steps of all events emitted later. A launch's trace gets the `name` and `promise` (see
    book.promise) if they were the same in all calls.
    """
    _get_recorder().emit(events, Origin(source, name, promise), num_steps)


def watch(buffer: torch.Tensor, num_chunks: int) -> None:
    """Follow the chunks of `buffer`: from now on the trace says what each of them holds, and what messages held.

    `buffer` is contiguous and laid out as by `lanes(num_chunks)`; raises WatchError if it is not. Watching another
    buffer ends the first watch. Without a recording this does nothing, so the same function runs under torchrun.
    """
    recorder = current()
    if recorder:
        recorder.watch(buffer, num_chunks)


def lanes(num_chunks: int, world_size: int | None = None, block: int = 1, dtype: torch.dtype = torch.float32,
          device: torch.device | str | None = None) -> torch.Tensor:
    """A buffer whose contents say whose data is in it: this rank's lane of every chunk is 1, the others 0.

    Shape (num_chunks * world_size * block,): per chunk one lane of `block` elements for each rank, so that the lanes of
    any sum count how often each rank is in it. `world_size` and the device default to those of the default group.
    """
    if not dist.is_initialized():
        raise WatchError("lanes() fills this rank's lane: call dist.init_process_group() first")
    if device is None:
        device = message_device()
    shape = (num_chunks, world_size or dist.get_world_size(), block)
    buffer = torch.zeros(shape, dtype=dtype, device=device)
    buffer[:, dist.get_rank()] = 1
    return buffer.view(-1)


@contextlib.contextmanager
def paused() -> Iterator[None]:
    """Leave this thread's operations out of the recording, for code that emits its own events about them.

    Operations that other threads issue in the meantime are recorded.
    """
    before, _thread.paused = _thread.paused, True
    try:
        yield
    finally:
        _thread.paused = before


@contextlib.contextmanager
def about(unit: str) -> Iterator[None]:
    """Label the operations that this thread issues in this block with `unit`, a part of the model."""
    before, _thread.unit = _thread.unit, unit
    try:
        yield
    finally:
        _thread.unit = before


def _get_recorder() -> _Recorder:
    global _recorder
    if _recorder is None:
        _recorder = _Recorder()
    return _recorder


class _Recorder(tap.Subscriber):
    """One process's recording; any thread may issue operations, and backends complete them in their own threads.

    One lock guards it all; nothing that may call back into the recorder runs while the lock is held.
    """

    def __init__(self) -> None:
        self.recording = Recording()
        self._indices: dict[int, int] = {}  # positions of operations in the recording, by their serial numbers
        self.started = False  # until `start`, it only keeps emitted events
        self.line: Callable[[Sequence[torch.Tensor]], CellLine | None] | None = None
        self._lock = threading.Lock()
        self._waited: set[int] = set()
        self._watch: BufferWatch | None = None
        self._arriving: dict[int, Sequence[torch.Tensor]] = {}  # targets of receives in flight, while watching
        self._futures: dict[int, torch.futures.Future] = {}
        self._num_steps = 0  # sum over all calls of `emit`
        self._follower: Follower | None = None

    def issued(self, op: Op, tensors: Sequence[torch.Tensor]) -> None:
        """Record a call that is about to be made."""
        if _thread.paused or any([tensor.is_meta for tensor in tensors]):  # torch moves nothing for meta tensors
            return
        kind, collective = (op.kind, None) if op.is_message else ("collective", op.kind)
        operation = Operation(kind, collective, op.group.name, op.group.ranks, op.peer, op.tag, float(op.num_bytes),
                              start_ns=0, line=self.line(tensors) if self.line and kind == "send" else None,
                              parts=tuple(map(float, op.part_bytes)) or None)
        with self._lock:
            recording = self.recording
            index, position = len(recording.operations), len(recording.log)
            self._indices[op.serial] = index
            recording.operations.append(operation)
            recording.log.append(("issue", index))
            if self._watch:
                self._watch.issued(index, operation, tensors, position)
                if operation.kind == "recv":
                    self._arriving[index] = tensors
            if self._follower:
                operation.bucket, gradients = self._follower.issued(index, operation, tensors)
                for place in gradients:
                    recording.gradients[place].bucket = operation.bucket
            operation.unit = _thread.unit
            operation.start_ns = time.monotonic_ns()

    def withdrawn(self, op: Op) -> None:
        """Record that the backend refused a call: its entry stays, since positions depend on it, but is ignored."""
        with self._lock:
            index = self._indices.get(op.serial)
            if index is None:
                return
            self.recording.operations[index].withdrawn = True
            self._arriving.pop(index, None)
            if self._watch:
                self._watch.withdrawn(index)

    def waited(self, op: Op, source_rank: Callable[[], int] | None = None) -> None:
        """Record that the program has waited for an operation; only the first wait counts.

        Its end is when it completed, if known, else now. For a receive from any source, `source_rank()` gives the
        sender's rank in the operation's group.
        """
        now_ns = time.monotonic_ns()
        with self._lock:
            index = self._indices.get(op.serial)
            if index is None or index in self._waited:
                return
            self._waited.add(index)
            operation, position = self.recording.operations[index], len(self.recording.log)
            operation.end_ns = operation.end_ns or now_ns
            if operation.kind == "recv" and operation.peer is None and source_rank:
                operation.peer = operation.ranks[source_rank()]
            self.recording.log.append(("wait", index))
            tensors = self._arriving.pop(index, ())
            if self._watch and index in self._watch.spans:
                self._watch.waited(index, operation, tensors, position)

    def completes(self, op: Op, future: torch.futures.Future) -> None:
        """Have the backend's thread record the completion; `collect` records it if that thread has not yet."""
        with self._lock:
            index = self._indices.get(op.serial)
            if index is None:
                return
            self._futures[index] = future
        future.add_done_callback(lambda _: self._completed(index))  # outside the lock: it may be called at once

    def follows(self, op: Op) -> bool:
        """Whether to record when this operation completes, whoever waits for it: a collective while following."""
        return self._follower is not None and not op.is_message and op.serial in self._indices

    def follow(self, follower: Follower | None) -> None:
        """Ask `follower` about each operation from now on; None stops that."""
        with self._lock:
            if follower and self._follower:
                raise RuntimeError("a backward pass is being followed already: end that `with` block first")
            self._follower = follower

    def ready(self, name: str, num_bytes: int, start_ns: int, end_ns: int) -> int:
        """Record that a gradient is ready; returns its position among the recording's gradients."""
        with self._lock:
            gradients = self.recording.gradients
            gradients.append(Gradient(name, num_bytes, len(self.recording.log), start_ns, end_ns))
            return len(gradients) - 1

    def retime(self, rows: str, index: int, name: str, time_ns: int) -> None:
        """Correct the "start_ns" or "end_ns" (`name`) of entry `index` in "gradients" or "operations" (`rows`)."""
        with self._lock:
            setattr(getattr(self.recording, rows)[index], name, time_ns)

    def _completed(self, index: int) -> None:
        with self._lock:
            self._note_completion(index)

    def _note_completion(self, index: int) -> None:
        operation = self.recording.operations[index]
        if self._follower:  # even if it was waited for: on a GPU a wait may return before the operation ends
            self._follower.completed(index)
        operation.end_ns = operation.end_ns or time.monotonic_ns()
        self._futures.pop(index, None)

    def emit(self, events: Iterable[Event], origin: Origin, num_steps: int) -> None:
        with self._lock:
            self.recording.origins.append(origin)
            self.recording.emitted += [replace(event, step=None if event.step is None else event.step + self._num_steps)
                                       for event in events]
            self._num_steps += num_steps

    def watch(self, buffer: torch.Tensor, num_chunks: int) -> None:
        with self._lock:
            resolution = torch.finfo(buffer.dtype).eps if buffer.is_floating_point() else 0.0
            new = BufferWatch(buffer, num_chunks, dist.get_world_size(), resolution, len(self.recording.log))
            if self._watch:
                self.recording = self._read()
            self._watch = new

    def collect(self) -> Recording:
        with self._lock:
            return self._read()

    def _read(self) -> Recording:
        """A copy of the recording, with what the watched buffer shows."""
        recording = self.recording
        for index, future in list(self._futures.items()):
            if future.done():
                self._note_completion(index)
        pieces, holds = read(self._watch, recording.operations, len(recording.log)) if self._watch else ({}, [])
        operations = [replace(operation, pieces=pieces.get(index, operation.pieces))
                      for index, operation in enumerate(recording.operations)]
        return replace(recording, operations=operations, log=list(recording.log), holds=recording.holds + holds,
                       gradients=[replace(gradient) for gradient in recording.gradients],
                       emitted=list(recording.emitted), origins=list(recording.origins))
