"""L2: the process group that sees the operations that pass through it, whoever calls it.

It sees what patching `dist.*` functions would miss: DDP's all-reduces come from C++. It misses the groups that C++
makes, by `split_group`, as a mesh of devices does on GPUs.
"""
from __future__ import annotations

import itertools
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup, Work, distributed_c10d

from book.tap.log import LOG, NOBODY, Described, Op, OwnGroup
from book.tap.place import caller, caller_and_chain
from book.tap.replaced import replace, uncompiled
from book.tap.work import Request, wrapped

Tensors = Sequence[torch.Tensor]


class Method(NamedTuple):
    """A method of torch's process group.

    `kind` is the collective that it is a variant of, `place` that of the argument with the tensors that must be alike
    on all ranks (None: there are none), which holds them one level deeper where it `is_nested`.
    """
    kind: str
    place: int | None = 0
    is_nested: bool = False


COLLECTIVES = {
    "allreduce": Method("all_reduce"), "allreduce_coalesced": Method("all_reduce"),
    "allgather": Method("all_gather", is_nested=True), "_allgather_base": Method("all_gather", 1),
    "all_gather_single": Method("all_gather", 1), "allgather_coalesced": Method("all_gather", 1),
    "all_gather_single_coalesced": Method("all_gather", 1), "allgather_into_tensor_coalesced": Method("all_gather", 1),
    "reduce_scatter": Method("reduce_scatter", 1, is_nested=True), "_reduce_scatter_base": Method("reduce_scatter"),
    "reduce_scatter_single": Method("reduce_scatter"), "reduce_scatter_single_coalesced": Method("reduce_scatter"),
    "reduce_scatter_tensor_coalesced": Method("reduce_scatter"),
    "alltoall": Method("all_to_all", None), "alltoall_base": Method("all_to_all", 1),
    "all_to_all_single": Method("all_to_all", 1),
    "broadcast": Method("broadcast"), "reduce": Method("reduce"), "scatter": Method("scatter"),
    "gather": Method("gather", 1), "barrier": Method("barrier", None), "monitored_barrier": Method("barrier", None),
}
ROOTED, REDUCING = {"broadcast", "reduce", "scatter", "gather"}, {"all_reduce", "reduce", "reduce_scatter"}
SPLIT = {"alltoall_base", "all_to_all_single"}  # their arguments 2 and 3 are the sizes of parts
_METHODS = {name: getattr(ProcessGroup, name) for name in [*COLLECTIVES, "send", "recv", "recv_anysource"]
            if hasattr(ProcessGroup, name)}


class Inside(threading.local):
    """Whether this thread is inside a collective that is made of others, and has been noted as one."""
    is_so = False


inside = Inside()


def install() -> None:
    """See what passes through every process group that is created from now on.

    Torch looks the class up by this name whenever it creates a group, whatever the backend, so `get_backend()`, debug
    wrappers and groups with several backends keep working. A group of the plain class can't be changed into the other,
    and torch expects that all are of one; so with groups already there, only what Python calls in any of them is seen.
    """
    if not dist.is_initialized():
        replace(distributed_c10d, "ProcessGroup", TapGroup)
    else:
        for name in _METHODS:
            replace(ProcessGroup, name, _tapped(name))


class _Calls:
    """What has been called in one group."""

    def __init__(self) -> None:
        self.group: OwnGroup | None = None  # known only after the group's constructor
        self.collectives, self.messages = itertools.count(1), itertools.count(1)
        # Shared by all threads, as in the backend: what another thread issues in the meantime is coalesced too.
        self.batch: list[Op] | None = None

    def of(self, group: ProcessGroup) -> OwnGroup:
        """The group that these calls are in."""
        if self.group is None:
            try:
                ranks, backend = tuple(dist.get_process_group_ranks(group)), dist.get_backend_config(group)
            except KeyError:  # torch has not registered it yet
                return OwnGroup(group.group_name, tuple(range(group.size())), "", group.rank())
            self.group = OwnGroup(group.group_name, ranks, backend, dist.get_rank())
        return self.group


_others: WeakKeyDictionary[ProcessGroup, _Calls] = WeakKeyDictionary()  # of groups that are no TapGroup


def calls_in(group: ProcessGroup) -> _Calls:
    """The calls in a group."""
    if type(group) is TapGroup:
        return group.calls
    if group not in _others:
        _others[group] = _Calls()
    return _others[group]


class TapGroup(ProcessGroup):
    """A process group that notes every operation and leaves the work to a plain group with the same backends.

    Torch builds it in place of its own class and then registers backends (gloo, NCCL, one per device, with debug
    wrappers). Both groups get them, so whatever is not noted works as usual.
    """

    def __init__(self, store: dist.Store, rank: int, size: int):
        super().__init__(rank, size)
        self.inner, self.calls = ProcessGroup(store, rank, size), _Calls()

    def __repr__(self) -> str:
        return repr(self.inner)  # torch's errors name the group

    def _register_backend(self, *args: Any) -> None:
        super()._register_backend(*args)
        self.inner._register_backend(*args)

    def _set_default_backend(self, *args: Any) -> None:
        super()._set_default_backend(*args)
        self.inner._set_default_backend(*args)

    def get_group_store(self) -> dist.Store:
        return self.inner.get_group_store()

    def _start_coalescing(self, device: torch.device) -> None:
        self.calls.batch = []
        self.inner._start_coalescing(device)

    def _end_coalescing(self, device: torch.device) -> Work | None:
        batch, self.calls.batch = self.calls.batch or [], None
        try:
            work = self.inner._end_coalescing(device)
        except Exception:
            for op in batch:
                LOG.withdraw(op)
            raise
        return wrapped(work, batch)


def _tapped(name: str) -> Callable[..., Any]:
    return (_seen if name in COLLECTIVES else _message)(name)


def _message(name: str) -> Callable[..., Work | Request | None]:
    """A method that sends or receives, and notes it: nothing is done twice here, a short message takes as long."""
    method, kind, has_peer = _METHODS[name], name[:4], name != "recv_anysource"

    def call(self: ProcessGroup, tensors: list[torch.Tensor], *args: int) -> Work | Request | None:
        group, calls = (self.inner, self.calls) if type(self) is TapGroup else (self, calls_in(self))
        if not LOG.is_on:
            return method(group, tensors, *args)
        own, tensor = calls.group or calls.of(self), tensors[0]  # torch sends one at a time
        function, place, owner, in_backward = caller(sys._getframe())
        op = Op(kind, function, own, next(calls.messages), place, owner, in_backward,
                _in_world(own, args[0]) if has_peer else None, args[-1], (Described(tensor.dtype, tensor.shape),))
        work = _logged(op, tensors, calls, method, group, tensors, *args)
        if calls.batch is not None:
            return work
        return Request(work, (op,)) if work is not None and function else wrapped(work, (op,))

    return uncompiled(call)


def _seen(name: str) -> Callable[..., Work | None]:
    """A method that notes its calls. Torch passes tensors by position, both from Python and from C++."""
    method = _METHODS[name]

    def call(self: ProcessGroup, *args: Any, **options: Any) -> Work | None:
        group, calls = (self.inner, self.calls) if type(self) is TapGroup else (self, calls_in(self))
        if not LOG.is_on:
            return method(group, *args, **options)
        op, tensors = _collective(name, calls.group or calls.of(self), calls, (*args, *options.values()))
        work = _logged(op, tensors, calls, method, group, *args, **options)
        return work if calls.batch is not None else wrapped(work, (op,))

    return uncompiled(call)


def _logged(op: Op, tensors: Tensors, calls: _Calls, method: Callable[..., Work | None], group: ProcessGroup,
            *args: Any, **options: Any) -> Work | None:
    """Make a call that is noted first; torch may refuse it, and a batch waits for all of its calls together."""
    LOG.write(op, tensors)
    try:
        work = method(group, *args, **options)
    except Exception:
        LOG.withdraw(op)
        raise
    if calls.batch is not None:
        calls.batch.append(op)
    return work


def _collective(name: str, group: OwnGroup, calls: _Calls, args: Sequence[Any]) -> tuple[Op, Tensors]:
    """A collective as an op, and all tensors in its arguments."""
    kind, place, is_nested = COLLECTIVES[name]
    sides = [_side(arg) for arg in args]
    tensors = [tensor for side in sides for tensor in side]
    options = args[-1] if args else None
    (function, line, owner, in_backward), lines = caller_and_chain(sys._getframe(1))
    if function is None and owner is None and in_backward and LOG.models:
        owner = "DDP"  # its reducer, which is C++
    alike = () if place is None else _side(args[place][0]) if is_nested else sides[place]
    root = _in_world(group, getattr(options, "rootRank", None)) if kind in ROOTED else None
    reduced_with = getattr(options, "reduceOp", None) if kind in REDUCING else None
    splits = (tuple(args[2]), tuple(args[3])) if name in SPLIT else ((), ())
    num_bytes = max([_bytes_in(side) for side in sides if side] or [0])
    described = tuple([Described(tensor.dtype, tensor.shape) for tensor in alike])
    return Op(kind, function, group, next(calls.collectives), line, owner, in_backward, None, 0, described, num_bytes,
              root, reduced_with, splits, (), inside.is_so, lines), tensors


def _side(arg: Any) -> Tensors:
    """The tensors in one argument."""
    if isinstance(arg, list):
        return arg if arg and isinstance(arg[0], torch.Tensor) else list(tensors_in(arg))
    return [arg] if isinstance(arg, torch.Tensor) else ()


def _bytes_in(tensors: Tensors) -> int:
    num_bytes = 0
    for tensor in tensors:
        num_bytes += tensor.numel() * tensor.element_size()  # nbytes is not defined for sparse tensors
    return num_bytes


def _in_world(group: OwnGroup, rank: int | None) -> int | None:
    """The rank in the world of a rank in a group; NOBODY if the group has no such rank."""
    return None if rank is None else group.ranks[rank] if 0 <= rank < len(group.ranks) else NOBODY


def tensors_in(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    """The tensors among `values`, and in the lists, tuples and dicts among them."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from tensors_in(value)
        elif isinstance(value, dict):
            yield from tensors_in(value.values())


for _name in _METHODS:
    setattr(TapGroup, _name, _tapped(_name))
