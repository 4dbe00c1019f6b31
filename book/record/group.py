"""L2: a process group that records the operations that pass through it.

It sees what patching `dist.*` functions would miss: DDP's all-reduces come from C++, FSDP's from inside torch.
"""
from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup, Work, distributed_c10d

from book.record.recording import Operation

# Names of torch's process group methods, grouped by the operation that they are variants of.
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


class Recorder(Protocol):
    """What is notified of operations; called from any thread."""

    @property
    def paused(self) -> bool:
        """Whether operations of the calling thread are left out."""

    def issued(self, operation: Operation, tensors: Sequence[torch.Tensor]) -> int:
        """Record a call that is about to be made; returns its position in the recording."""

    def withdrawn(self, index: int) -> None:
        """Record that the backend refused a call: it counts as never made."""

    def waited(self, index: int, source_rank: Callable[[], int] | None = None) -> None:
        """Record that the program has waited for an operation; `source_rank()` gives the sender's rank in its group."""

    def completes(self, index: int, future: torch.futures.Future) -> None:
        """Record when `future` completes: the program may never wait for the operation itself."""

    def follows(self, index: int) -> bool:
        """Whether to record when this operation completes, whoever waits for it."""


def install(recorder: Recorder) -> None:
    """Make every process group that this process creates from now on report its operations to `recorder`.

    Torch looks the class up by this name whenever it creates a group, whatever the backend, so `get_backend()`, debug
    wrappers and groups with several backends keep working.
    """
    RecordingGroup.recorder = recorder
    distributed_c10d.ProcessGroup = RecordingGroup


class RecordedWork(Work):
    """A request that records when the program has waited for it, not when it completes: that varies between runs."""

    def __init__(self, recorder: Recorder, work: Work, indices: Sequence[int]):
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
        """The backend's future; if the program waits on that, only the time of completion is recorded."""
        future = self._work.get_future()
        for index in self._indices:
            self._recorder.completes(index, future)
        return future

    def _note(self) -> None:
        for index in self._indices:
            self._recorder.waited(index, self._work._source_rank)


def _delegated(method: str) -> Callable[..., Any]:
    return lambda self, *args: getattr(self._work, method)(*args)


for _method in ("is_success", "exception", "source_rank", "_source_rank", "result", "get_future_result",
                "_get_op_type", "_get_duration"):
    if hasattr(Work, _method):
        setattr(RecordedWork, _method, _delegated(_method))


class RecordingGroup(ProcessGroup):
    """A process group that records every operation and leaves the work to a plain group with the same backends.

    Torch builds it in place of its own class and then registers backends (gloo, NCCL, one per device, with debug
    wrappers). Both groups get them, so whatever is not recorded works as usual.
    """

    recorder: Recorder

    def __init__(self, store: dist.Store, rank: int, size: int):
        super().__init__(rank, size)
        self._inner = ProcessGroup(store, rank, size)
        self._ranks: tuple[int, ...] = ()
        self._name = ""
        # Shared by all threads, as in the backend: what another thread issues in the meantime is coalesced too.
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
        return self._call("send", None, "send", (tensors, dst, tag), peer=dst, tag=tag)

    def recv(self, tensors: list[torch.Tensor], src: int, tag: int) -> Work | None:
        return self._call("recv", None, "recv", (tensors, src, tag), peer=src, tag=tag)

    def recv_anysource(self, tensors: list[torch.Tensor], tag: int) -> Work | None:
        return self._call("recv", None, "recv_anysource", (tensors, tag), tag=tag)

    def _start_coalescing(self, device: torch.device) -> None:
        self._batch = []
        self._inner._start_coalescing(device)

    def _end_coalescing(self, device: torch.device) -> Work | None:
        batch, self._batch = self._batch or [], None
        try:
            work = self._inner._end_coalescing(device)
        except Exception:
            for index in batch:
                self.recorder.withdrawn(index)
            raise
        return self._wrapped(work, batch)

    def _call(self, kind: str, op: str | None, method: str, args: tuple[Any, ...], *, peer: int | None = None,
              tag: int = 0, keywords: dict[str, Any] | None = None) -> Work | None:
        issue, keywords = getattr(self._inner, method), keywords or {}
        tensors, num_bytes = _tensors_and_bytes(args) if kind == "collective" else (args[0], float(_bytes_of(args[0])))
        if self.recorder.paused or any([tensor.is_meta for tensor in tensors]):  # torch moves nothing for meta tensors
            return issue(*args, **keywords)
        if not self._ranks:  # known only after the constructor
            self._ranks, self._name = tuple(dist.get_process_group_ranks(self)), self.group_name
        operation = Operation(kind, op, self._name, self._ranks, self._global_rank(peer), tag, num_bytes, start_ns=0)
        index = self.recorder.issued(operation, tensors)
        try:
            work = issue(*args, **keywords)
        except Exception:
            self.recorder.withdrawn(index)
            raise
        if self._batch is None:
            return self._wrapped(work, [index])
        self._batch.append(index)
        return work

    def _global_rank(self, peer: int | None) -> int | None:
        """The peer's rank in the world; a peer outside the group stays as given, and the backend reports the error."""
        return self._ranks[peer] if peer is not None and 0 <= peer < len(self._ranks) else peer

    def _wrapped(self, work: Work | None, indices: list[int]) -> Work | None:
        if work is not None:
            recorded = RecordedWork(self.recorder, work, indices)
            if any(map(self.recorder.follows, indices)):
                recorded.get_future()
            return recorded
        for index in indices:  # the call was synchronous: there is no request to wait for
            self.recorder.waited(index)
        return None


def _recorded_collective(op: str, method: str) -> Callable[..., Work | None]:
    # Torch passes tensors by position, both from Python and from C++.
    return lambda self, *args, **keywords: self._call("collective", op, method, args, keywords=keywords)


for _op, _methods in COLLECTIVES.items():
    for _method in _methods:
        if hasattr(ProcessGroup, _method):
            setattr(RecordingGroup, _method, _recorded_collective(_op, _method))


def tensors_in(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    """The tensors among `values`, and in the lists, tuples and dicts among them."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from tensors_in(value)
        elif isinstance(value, dict):
            yield from tensors_in(value.values())


def _tensors_and_bytes(args: Iterable[Any]) -> tuple[list[torch.Tensor], float]:
    """All tensors in a call's arguments, and the most bytes in one argument: the larger of its input and its output."""
    tensors: list[torch.Tensor] = []
    most = 0
    for arg in args:
        own = list(tensors_in([arg]))
        most = max(most, _bytes_of(own))
        tensors += own
    return tensors, float(most)


def _bytes_of(tensors: Iterable[torch.Tensor]) -> int:
    return sum([tensor.numel() * tensor.element_size() for tensor in tensors])
