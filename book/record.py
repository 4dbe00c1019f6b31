"""L2: record what a torch.distributed program does, whatever issues its operations.

`start()` makes every process group that is created afterwards a `RecordingGroup`: it hands each call on to the backend
that was asked for and notes it with CLOCK_MONOTONIC, which all ranks of a machine share. So it also sees what patching
`dist.*` functions misses: DDP's all-reduces come from C++, FSDP's from inside torch. `watch(buffer, num_chunks)` adds
what was in the messages. `collect()` hands over what a rank saw; `assemble` (see happens_before) makes the trace.

On a GPU a wait orders the stream and returns at once, so end times are those of the program, not of the wire.
"""
from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup, Work, distributed_c10d

from book.happens_before import Operation, Recording, assemble
from book.provenance import Watch, WatchError
from book.trace import Event

__all__ = ["Recording", "RecordingGroup", "WatchError", "assemble", "collect", "emit", "lanes", "message_device", "paused", "start",
           "watch"]

# Names of torch's process group methods, by the operation that they are variants of.
COLLECTIVES = {
    "all_reduce": ("allreduce", "allreduce_coalesced"),
    "all_gather": ("allgather", "_allgather_base", "all_gather_single", "allgather_coalesced",
                   "all_gather_single_coalesced", "allgather_into_tensor_coalesced"),
    "reduce_scatter": ("reduce_scatter", "_reduce_scatter_base", "reduce_scatter_single",
                       "reduce_scatter_single_coalesced", "reduce_scatter_tensor_coalesced"),
    "all_to_all": ("alltoall", "alltoall_base", "all_to_all_single"),
    "broadcast": ("broadcast",),
    "reduce": ("reduce",),
    "scatter": ("scatter",),
    "gather": ("gather",),
    "barrier": ("barrier", "monitored_barrier"),
}
_PlainGroup = ProcessGroup  # what start() replaces in distributed_c10d
_recorder: _Recorder | None = None


def start() -> None:
    """Record this process from here on: call it in a rank before `dist.init_process_group()`."""
    _get_recorder()
    distributed_c10d.ProcessGroup = RecordingGroup


def collect() -> Recording | None:
    """What this rank has done so far, small and picklable; None when nothing was to be recorded.

    May be called from another thread while the program hangs, and more than once.
    """
    return _recorder.collect() if _recorder else None


def emit(*events: Event, source: str = "instrumented", name: str | None = None, num_steps: int = 0) -> None:
    """Add events that the program itself knows of; times in seconds of `time.monotonic()`.

    For code that moves data past process groups (threads, RPC) and for `execute`, whose `source` is "executed". Steps
    of events that are emitted later count from `num_steps` on, where that is given.
    """
    _get_recorder().emit(events, source, name, num_steps)


def watch(buffer: torch.Tensor, num_chunks: int) -> None:
    """Follow the chunks of `buffer`: from here on the trace says what each of them holds, and what messages held.

    `buffer` is contiguous and made as by `lanes(num_chunks)`; raises WatchError when it is not. Watching another
    buffer ends the first one's watch. Without a recording it does nothing, so the same function runs under torchrun.
    """
    if _recorder:
        _recorder.watch(buffer, num_chunks)


def lanes(num_chunks: int, world_size: int | None = None, block: int = 1, dtype: torch.dtype = torch.float32,
          device: torch.device | str | None = None) -> torch.Tensor:
    """A buffer whose contents say whose data is in it: this rank's lane of every chunk is 1, the others 0.

    Shape (num_chunks * world_size * block,): per chunk one lane of `block` elements for each rank, so that any sum is
    the list of how often each rank is in it. `world_size` and the device are the default group's if not given.
    """
    if not dist.is_initialized():
        raise WatchError("lanes() fills this rank's lane: call dist.init_process_group() first")
    if device is None:
        device = message_device()
    shape = (num_chunks, world_size or dist.get_world_size(), block)
    buffer = torch.zeros(shape, dtype=dtype, device=device)
    buffer[:, dist.get_rank()] = 1
    return buffer.view(-1)


def message_device() -> torch.device:
    """The device that the default group's backend takes tensors from: this rank's GPU under NCCL, else the CPU."""
    on_gpu = torch.cuda.is_available() and dist.get_backend() in ("nccl", "undefined")
    return torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")


@contextlib.contextmanager
def paused() -> Iterator[None]:
    """Leave operations out of the recording, for code that emits its own events about them."""
    if _recorder is None:
        yield
        return
    before, _recorder.paused = _recorder.paused, True
    try:
        yield
    finally:
        _recorder.paused = before


def _get_recorder() -> _Recorder:
    global _recorder
    if _recorder is None:
        _recorder = _Recorder()
    return _recorder


class _Recorder:
    """One process's recording; any thread may issue operations."""

    def __init__(self) -> None:
        self.recording = Recording()
        self.paused = False
        self._lock = threading.Lock()
        self._waited: set[int] = set()
        self._watch: Watch | None = None
        self._arriving: dict[int, Sequence[torch.Tensor]] = {}  # what receives in flight will fill, under a watch
        self._num_steps = 0  # of what has been emitted

    def issued(self, operation: Operation, tensors: Sequence[torch.Tensor]) -> int:
        """Note a call that is about to be made; returns its position in the recording."""
        with self._lock:
            recording = self.recording
            index, position = len(recording.operations), len(recording.log)
            recording.operations.append(operation)
            recording.log.append(("issue", index))
            if self._watch:
                self._watch.issued(index, operation, tensors, position)
                if operation.kind == "recv":
                    self._arriving[index] = tensors
            operation.start_ns = time.monotonic_ns()
            return index

    def waited(self, index: int) -> None:
        """Note that the program has waited for an operation; only the first wait counts."""
        now_ns = time.monotonic_ns()
        with self._lock:
            if index in self._waited:
                return
            self._waited.add(index)
            operation, position = self.recording.operations[index], len(self.recording.log)
            operation.end_ns = now_ns
            self.recording.log.append(("wait", index))
            tensors = self._arriving.pop(index, ())
            if self._watch and index in self._watch.spans:
                self._watch.waited(index, operation, tensors, position)

    def emit(self, events: Iterable[Event], source: str, name: str | None, num_steps: int) -> None:
        with self._lock:
            self.recording.source, self.recording.name = source, name
            self.recording.emitted += [event if event.step is None else replace(event, step=event.step + self._num_steps)
                                       for event in events]
            self._num_steps += num_steps

    def watch(self, buffer: torch.Tensor, num_chunks: int) -> None:
        with self._lock:
            resolution = torch.finfo(buffer.dtype).eps if buffer.is_floating_point() else 0.0
            new = Watch(buffer, num_chunks, dist.get_world_size(), resolution, len(self.recording.log))
            if self._watch:
                self.recording = self._read()
            self._watch = new

    def collect(self) -> Recording:
        with self._lock:
            return self._read()

    def _read(self) -> Recording:
        """A copy of the recording, with what the watched buffer tells."""
        recording = self.recording
        pieces, holds = self._watch.read(recording.operations, len(recording.log)) if self._watch else ({}, [])
        operations = [replace(operation, pieces=pieces.get(index, operation.pieces))
                      for index, operation in enumerate(recording.operations)]
        return replace(recording, operations=operations, log=list(recording.log), holds=recording.holds + holds,
                       emitted=list(recording.emitted))


class RecordedWork(Work):
    """A request that notes when the program has waited for it: when it completed by itself is a matter of chance."""

    def __init__(self, recorder: _Recorder, work: Work, indices: Sequence[int]):
        super().__init__()
        self._recorder, self._work, self._indices = recorder, work, indices

    def wait(self, *args: Any) -> bool:
        done = self._work.wait(*args)
        self._note()
        return done

    def is_completed(self) -> bool:
        done = self._work.is_completed()
        if done:
            self._note()
        return done

    def synchronize(self) -> None:
        self._work.synchronize()
        self._note()

    def block_current_stream(self) -> None:
        self._work.block_current_stream()
        self._note()

    def get_future(self) -> torch.futures.Future:
        """The backend's future; who waits for that instead of this leaves only the time of completion."""
        future = self._work.get_future()
        future.add_done_callback(lambda _: self._stamp(time.monotonic_ns()))
        return future

    def _note(self) -> None:
        for index in self._indices:
            operation = self._recorder.recording.operations[index]
            if operation.kind == "recv" and operation.peer is None:
                operation.peer = operation.ranks[self._work._source_rank()]
            self._recorder.waited(index)

    def _stamp(self, now_ns: int) -> None:
        for index in self._indices:
            operation = self._recorder.recording.operations[index]
            operation.end_ns = operation.end_ns or now_ns


def _handed_on(method: str) -> Callable[..., Any]:
    return lambda self, *args: getattr(self._work, method)(*args)


for _method in ("is_success", "exception", "source_rank", "_source_rank", "result", "get_future_result",
                "_get_op_type", "_get_duration"):
    if hasattr(Work, _method):
        setattr(RecordedWork, _method, _handed_on(_method))


class RecordingGroup(ProcessGroup):
    """A process group that notes every operation and leaves the work to a plain one with the same backends.

    Torch builds it in place of its own class and then gives it backends (gloo, NCCL, one per device, with debug
    wrappers): both groups get them, so whatever is not recorded works as ever.
    """

    def __init__(self, store: dist.Store, rank: int, size: int):
        super().__init__(rank, size)
        self._inner = _PlainGroup(store, rank, size)
        self._ranks: tuple[int, ...] = ()
        self._batch: list[int] | None = None

    def _register_backend(self, *args: Any) -> None:
        super()._register_backend(*args)
        self._inner._register_backend(*args)

    def _set_default_backend(self, *args: Any) -> None:
        super()._set_default_backend(*args)
        self._inner._set_default_backend(*args)

    def get_group_store(self) -> dist.Store:
        return self._inner.get_group_store()

    def send(self, tensors: list[torch.Tensor], dst: int, tag: int) -> Work | None:
        return self._call("send", None, "send", (tensors, dst, tag), {}, dst, tag)

    def recv(self, tensors: list[torch.Tensor], src: int, tag: int) -> Work | None:
        return self._call("recv", None, "recv", (tensors, src, tag), {}, src, tag)

    def recv_anysource(self, tensors: list[torch.Tensor], tag: int) -> Work | None:
        return self._call("recv", None, "recv_anysource", (tensors, tag), {}, None, tag)

    def _start_coalescing(self, device: torch.device) -> None:
        self._batch = []
        self._inner._start_coalescing(device)

    def _end_coalescing(self, device: torch.device) -> Work | None:
        batch, self._batch = self._batch or [], None
        return self._wrapped(self._inner._end_coalescing(device), batch)

    def _call(self, kind: str, op: str | None, method: str, args: tuple, kwargs: dict, peer: int | None = None,
              tag: int = 0) -> Work | None:
        issue = getattr(self._inner, method)
        if _recorder is None or _recorder.paused:
            return issue(*args, **kwargs)
        self._ranks = self._ranks or _global_ranks(self)
        tensors = list(_tensors((*args, *kwargs.values())))
        num_bytes = max((_num_bytes(arg) for arg in (*args, *kwargs.values())), default=0)
        operation = Operation(kind, op, self.group_name, self._ranks, None if peer is None else self._ranks[peer], tag,
                              float(num_bytes), 0)
        index = _recorder.issued(operation, tensors)
        work = issue(*args, **kwargs)
        if self._batch is None:
            return self._wrapped(work, [index])
        self._batch.append(index)
        return work

    def _wrapped(self, work: Work | None, indices: list[int]) -> Work | None:
        if work is not None:
            return RecordedWork(_recorder, work, indices)
        for index in indices:  # the backend has synchronised by itself
            _recorder.waited(index)
        return None


def _recorded_collective(op: str, method: str) -> Callable[..., Work | None]:
    return lambda self, *args, **kwargs: self._call("collective", op, method, args, kwargs)


for _op, _methods in COLLECTIVES.items():
    for _method in _methods:
        if hasattr(ProcessGroup, _method):
            setattr(RecordingGroup, _method, _recorded_collective(_op, _method))


def _global_ranks(group: ProcessGroup) -> tuple[int, ...]:
    return tuple(dist.get_process_group_ranks(group))


def _tensors(arguments: Iterable[Any]) -> Iterator[torch.Tensor]:
    for argument in arguments:
        if isinstance(argument, torch.Tensor):
            yield argument
        elif isinstance(argument, (list, tuple)):
            yield from _tensors(argument)


def _num_bytes(argument: Any) -> int:
    """Bytes of an argument's tensors; an operation counts the larger of its input and its output."""
    return sum(tensor.numel() * tensor.element_size() for tensor in _tensors([argument]))
