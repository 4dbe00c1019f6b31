"""L2: follow a backward pass: when each gradient was ready, and which bucket's all-reduce carried it.

The recorder sees all-reduces, but not what is in them. `follow_backward` adds when each gradient became ready, from
hooks on the parameters, and whose gradients an all-reduce carries: for torch's DDP from a communication hook, which is
told what its bucket holds; for any other module from the tensor's address in memory (see buckets).
"""
from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import register_multi_grad_hook
from torch.nn.parallel import DistributedDataParallel as DDP

from book.record import recorder
from book.record.buckets import OwnBuckets
from book.record.clock import Clock
from book.record.recording import Operation
from book.tap.group import tensors_in

HOOKED = ("this model has a communication hook already and DDP takes only one: give that hook to "
          "follow_backward(model, hook=...) instead of registering it")
Hook = Callable[[dist.ProcessGroup, dist.GradBucket], torch.futures.Future[torch.Tensor]]


@contextlib.contextmanager
def follow_backward(model: nn.Module, hook: Hook | None = None) -> Iterator[None]:
    """Record the backward passes of `model` in this block: when each gradient is ready and which bucket carries it.

    The trace gets, in program order, a compute event for each gradient (`op` is the parameter's name in the wrapped
    module; `start_s` is when the previous gradient was ready or backward began; if forward ran before the block, the
    first gradient's `start_s` is the block's start), and the rank's all-reduces get their `bucket`. Follow DDP from its
    second backward on, or from its third with static_graph=True: before that it uses different buckets.

    `hook(group, bucket)`, for DDP only, sends the buckets in this block, such as torch's `fp16_compress_hook`; wrap one
    that takes its own state in a lambda: `lambda _, bucket: powerSGD_hook(state, bucket)`. Without `hook`, and outside
    the block, buckets are averaged bit for bit as DDP does, with one exception: with gradient_as_bucket_view=True DDP
    divides gradients that were there before this pass (zero_grad(set_to_none=False), no_sync) by N, where a hook
    multiplies all of them by 1/N, which may round differently. A DDP that was recorded or given a `hook` keeps the
    communication hook that does this: copy.deepcopy and register_comm_hook fail on it from then on, so copy it before.

    Another module's all-reduce is identified by the gradients in its memory, or, for a copy, by the module's `buckets`
    (lists of parameters); otherwise its bucket stays None, as does that of a gradient that no all-reduce has carried.
    Without a recording nothing is recorded and `hook` still sends, so the same function runs under torchrun. On a GPU,
    times are those of its streams, unless the block raises. Raises ValueError for a DDP that has another communication
    hook, or a `hook` without DDP.
    """
    if hook and not isinstance(model, DDP):
        raise ValueError("hook= works only with torch's DDP: wrap the model in DDP, or leave hook= out")
    recording = recorder.current()
    sender = _sender(model) if isinstance(model, DDP) and (recording or hook) else None
    follower = _Follower(model, recording, sender) if recording else None
    with contextlib.ExitStack() as stack:
        if follower:
            stack.enter_context(follower.following())
        if sender:
            stack.enter_context(sender.sending(hook, follower))
        yield


class _Sender:
    """What a DDP model's communication hook does: a model accepts only one, which can't be replaced."""

    def __init__(self, group: dist.ProcessGroup):
        self.group = group
        self.hook: Hook = _average
        self.follower: _Follower | None = None

    @contextlib.contextmanager
    def sending(self, hook: Hook | None, follower: _Follower | None) -> Iterator[None]:
        """Send with `hook` in this block, and notify `follower`."""
        before = self.hook
        self.hook, self.follower = hook or before, follower
        try:
            yield
        finally:
            self.hook, self.follower = before, None


_senders: WeakKeyDictionary[DDP, _Sender] = WeakKeyDictionary()


def _sender(model: DDP) -> _Sender:
    if model not in _senders:
        if model._comm_hooks:
            raise ValueError(HOOKED)
        sender = _Sender(model.process_group)
        try:
            model.register_comm_hook(sender, _send)
        except RuntimeError as error:  # a built-in C++ hook, which only the reducer knows about
            raise ValueError(HOOKED) from error
        _senders[model] = sender
    return _senders[model]


# DDP requires the argument to be called bucket, and rejects string annotations, which all in this module are.
def _send(sender, bucket):  # type: ignore[no-untyped-def]
    with sender.follower.bucket(bucket) if sender.follower else contextlib.nullcontext():
        return sender.hook(sender.group, bucket)


def _average(group: dist.ProcessGroup, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average as DDP does without a hook: multiply by 1/N, where torch's allreduce_hook divides by N.

    Identical to the last bit except for gradients that an earlier pass left in the bucket (gradient_as_bucket_view=True
    and not set to None): DDP divides these, and a hook can't tell which they are.
    """
    total = bucket.buffer().mul_(1 / group.size())
    return dist.all_reduce(total, group=group, async_op=True).get_future().then(lambda future: future.value()[0])


class _Follower:
    """Records the gradients of one model as they become ready, and tells the recorder which ones all-reduces carry."""

    def __init__(self, model: nn.Module, recording: recorder._Recorder, sender: _Sender | None):
        self._model, self._recording = model, recording
        self._names = _names(model)
        self._own = None if sender else OwnBuckets(model, self._names)
        self._unsent: dict[nn.Parameter, int] = {}  # position in the recording of gradients not yet sent
        # The bucket that DDP is sending: thread, index, parameters.
        self._bucket: tuple[int, int, list[nn.Parameter]] | None = None
        self._clock = Clock(next(iter(self._names), torch.empty(0)).device)
        self._since = self._clock.stamp()
        self._handles: list[Any] = []

    @contextlib.contextmanager
    def following(self) -> Iterator[None]:
        """Listen to the model and the recorder in this block."""
        self._recording.follow(self)
        with contextlib.ExitStack() as stack:
            stack.callback(self._recording.follow, None)
            stack.callback(self._remove_hooks)
            self._handles.append(self._model.register_forward_hook(self._forward_done))
            for parameter in self._names:
                self._handles.append(_hook_first(parameter, partial(self._ready, parameter)))
            yield
            self._correct_times()  # not after an error: it waits for the device, which may never finish

    @contextlib.contextmanager
    def bucket(self, bucket: dist.GradBucket) -> Iterator[None]:
        """Operations that this thread issues in this block carry `bucket`."""
        self._bucket = threading.get_ident(), bucket.index(), bucket.parameters()
        try:
            yield
        finally:
            self._bucket = None

    def issued(self, index: int, operation: Operation, tensors: Sequence[torch.Tensor]) -> tuple[int | None, list[int]]:
        """The bucket that an operation carries, and the positions of its gradients in the recording."""
        if operation.kind != "collective":
            return None, []
        self._clock.note("operations", index, "start_ns", self._clock.stamp())
        number: int | None = None
        parameters: list[str] = []
        if self._bucket and self._bucket[0] == threading.get_ident():
            _, number, parameters = self._bucket
        elif self._own and operation.op == "all_reduce":
            number, parameters = self._own.carried(tensors, dict(self._unsent))
        taken = [self._unsent.pop(parameter, None) for parameter in parameters]
        return number, [place for place in taken if place is not None]

    def completed(self, index: int) -> None:
        """Record on the device's clock that an operation has completed."""
        self._clock.note("operations", index, "end_ns", self._clock.stamp())

    def _remove_hooks(self) -> None:
        for handle in self._handles:
            handle.remove()

    def _correct_times(self) -> None:
        for correction in self._clock.corrections():
            self._recording.retime(*correction)

    def _forward_done(self, module: nn.Module, args: Any, output: Any) -> None:
        tensors = [tensor for tensor in tensors_in([output]) if tensor.requires_grad]
        if tensors:
            self._handles.append(register_multi_grad_hook(tensors, self._began, mode="any"))

    def _began(self, gradient: torch.Tensor) -> None:
        self._since = self._clock.stamp()

    def _ready(self, parameter: nn.Parameter, gradient: torch.Tensor | None) -> None:
        if gradient is None:
            return
        start, end = self._since, self._clock.stamp()
        self._since = end
        num_bytes = gradient.numel() * gradient.element_size()
        index = self._recording.ready(self._names[parameter], num_bytes, start.time_ns, end.time_ns)
        self._clock.note("gradients", index, "start_ns", start)
        self._clock.note("gradients", index, "end_ns", end)
        self._unsent[parameter] = index
        if self._own:
            self._own.arrives(parameter, gradient)


def _names(model: nn.Module) -> dict[nn.Parameter, str]:
    """The parameters that get gradients, with their names in the module that `model` wraps as its `module`."""
    named = {parameter: name for name, parameter in model.named_parameters() if parameter.requires_grad}
    wrapped = all(name.startswith("module.") for name in named.values())
    return {parameter: name.removeprefix("module.") if wrapped else name for parameter, name in named.items()}


def _hook_first(parameter: nn.Parameter, hook: Callable[[torch.Tensor], None]) -> Any:
    """Register `hook` to run before the parameter's other hooks, which may send the gradient; returns its handle."""
    handle = parameter.register_hook(hook)
    hooks = parameter._backward_hooks
    others = [(number, other) for number, other in hooks.items() if number != handle.id]
    for number, other in others:  # move them to the end of the dict itself, whose order C++ follows
        del hooks[number]
        hooks[number] = other
    return handle
