"""L2: follow the state of training: which part of a model a rank works on, and how much of each part it holds.

The recorder sees what is gathered and scattered; this module measures what a rank keeps, frees and computes.
"""
from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn

from book.cost import StateBytes
from book.record.recorder import about, emit
from book.trace import STATE, Event

WORK = ("forward", "backward", "update")
AVERAGING = ("all_reduce", "reduce_scatter")
METHODS = (*AVERAGING, "all_gather", "free")


def holds(what: str, unit: str, num_bytes: float) -> None:
    """Record that this rank now holds `num_bytes` of a unit's "parameters", "gradients" or other STATE.

    `unit` names the part of the model. Raises ValueError if `what` is not in STATE.
    """
    if what not in STATE:
        raise ValueError(f"a rank holds one of {', '.join(STATE)}, not {what!r}")
    now_s = time.monotonic()
    emit(Event(dist.get_rank(), "memory", what, num_bytes=float(num_bytes), unit=unit, start_s=now_s, end_s=now_s))


@contextlib.contextmanager
def unit_action(work: str, unit: str) -> Iterator[None]:
    """Record what runs in this block as the "forward", "backward" or "update" of a unit.

    Nothing is recorded if the block raises. Raises ValueError for other work, before the block runs.
    """
    _check_work(work)
    start_s = time.monotonic()
    yield
    unit_done(work, unit, start_s)


def unit_done(work: str, unit: str, start_s: float) -> None:
    """Record work that is not a block of code and ends now; `start_s` is `time.monotonic()` at its start."""
    _check_work(work)
    emit(Event(dist.get_rank(), "compute", work, unit=unit, start_s=start_s, end_s=time.monotonic()))


def _check_work(work: str) -> None:
    if work not in WORK:
        raise ValueError(f"a unit's work is one of {', '.join(WORK)}, not {work!r}")


def held_state(parameters: Iterable[torch.Tensor], optimizer: torch.optim.Optimizer | None = None) -> StateBytes:
    """The bytes that these parameters, their gradients and the optimizer's state for them actually take on this rank.

    Memory is counted once, however many tensors are views of it, and freed memory not at all; of a DTensor the local
    part counts. The optimizer's scalars, such as Adam's step number, are left out.
    """
    parameters = list(parameters)
    states = [optimizer.state.get(p, {}) for p in parameters] if optimizer else []
    kept = [value for state in states for value in state.values() if isinstance(value, torch.Tensor) and value.dim()]
    return StateBytes(storage_bytes(parameters), storage_bytes(p.grad for p in parameters if p.grad is not None),
                      storage_bytes(kept))


def storage_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """The bytes of memory behind these tensors: each storage counts once, and in full."""
    # A DTensor is recognized by its method: importing its class would take longer than most recorded programs.
    local = [tensor.to_local() if hasattr(tensor, "to_local") else tensor.detach() for tensor in tensors]
    storages = {storage.data_ptr(): storage.nbytes() for storage in (t.untyped_storage() for t in local)}
    return sum(storages.values())


class FollowedUnit(Protocol):
    """A part of a model whose state is gathered, averaged and freed together (see book.parallel.sharded).

    Its methods named in METHODS are followed.
    """

    name: str
    module: nn.Module
    parameters: Sequence[nn.Parameter]
    shard: nn.Parameter


def follow_units(units: Sequence[FollowedUnit], optimizer: torch.optim.Optimizer) -> None:
    """From now on, record which unit's forward and backward run, and what this rank holds of each unit.

    All numbers of bytes are measured: before and after each collective of a unit, after each forward and backward,
    after the optimizer's step and after its `zero_grad`.
    """
    _Follower(units, optimizer).measure()


class _Follower:
    def __init__(self, units: Sequence[FollowedUnit], optimizer: torch.optim.Optimizer) -> None:
        self.units, self.optimizer = units, optimizer
        self.seen: dict[tuple[str, str], float] = {}
        self.began: dict[tuple[str, str], float] = {}
        for unit in units:
            self._follow(unit)
        optimizer.register_step_pre_hook(lambda *_: self._begin("update", "all"))
        optimizer.register_step_post_hook(lambda *_: self._end("update", "all"))
        optimizer.zero_grad = self._measuring_after(optimizer.zero_grad)

    def measure(self, *_: Any) -> None:
        """Record what this rank holds of each unit, where that has changed."""
        for unit in self.units:
            held = held_state([*unit.parameters, unit.shard], self.optimizer)
            for what in ("parameters", "gradients", "optimizer"):
                num_bytes = getattr(held, what)
                if self.seen.get((what, unit.name), 0) != num_bytes:
                    self.seen[what, unit.name] = num_bytes
                    holds(what, unit.name, num_bytes)

    def _follow(self, unit: FollowedUnit) -> None:
        for method in METHODS:
            if hasattr(unit, method):
                setattr(unit, method, self._measuring(unit, method, getattr(unit, method)))
        unit.module.register_forward_pre_hook(lambda *_: self._begin("forward", unit.name))
        unit.module.register_forward_hook(lambda *_: self._end("forward", unit.name), prepend=True)
        unit.module.register_full_backward_pre_hook(lambda *_: self._begin("backward", unit.name))
        for p in unit.parameters:
            p.register_post_accumulate_grad_hook(lambda _: self._gradient_ready(unit))

    def _measuring(self, unit: FollowedUnit, method: str, call: Callable[[], None]) -> Callable[[], None]:
        def run() -> None:
            if method in AVERAGING:
                self._end("backward", unit.name)
            self.measure()
            with about(unit.name):
                call()
            self.measure()
        return run

    def _measuring_after(self, call: Callable[..., None]) -> Callable[..., None]:
        def run(*arguments: Any, **options: Any) -> None:
            call(*arguments, **options)
            self.measure()
        return run

    def _gradient_ready(self, unit: FollowedUnit) -> None:
        if all(p.grad is not None for p in unit.parameters):
            self._end("backward", unit.name)

    def _begin(self, work: str, unit: str) -> None:
        self.began[work, unit] = time.monotonic()

    def _end(self, work: str, unit: str) -> None:
        start_s = self.began.pop((work, unit), None)
        if start_s is not None:  # its last gradient or the averaging ends a unit's backward, whichever comes first
            unit_done(work, unit, start_s)
            self.measure()
