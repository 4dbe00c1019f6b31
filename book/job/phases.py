"""L2: when a training program reads its data, runs forward and backward, steps its optimizer, and collects garbage."""
from __future__ import annotations

import functools
import gc
import types
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.data import DataLoader, dataloader

from book.job.noted import RingNotes
from book.look.timelines import BACKWARD, COLLECTOR, FORWARD, INPUT, OPTIMIZER
from book.tap.imported import once_imported
from book.tap.replaced import replace, uncompiled, when_stopped

FULL = 2  # the generation of a full collection; others are short


def install(noted: RingNotes) -> None:
    """Have phases noted from now on. A model's forward is one if DDP or FSDP wraps it."""
    _time(noted, dataloader._BaseDataLoaderIter, "__next__", INPUT)
    _time(noted, DataLoader, "__iter__", INPUT)  # which starts the workers
    _time(noted, DistributedDataParallel, "forward", FORWARD)
    _time_sharded(noted)
    _time(noted, torch.autograd, "backward", BACKWARD)
    _time_optimizers(noted)
    _time_collector(noted)


def _time_sharded(noted: RingNotes) -> None:
    """A script that shards nothing does not load FSDP: importing it takes a rank most of a CPU second."""
    for module, name, method in (("fully_sharded_data_parallel", "FullyShardedDataParallel", "forward"),
                                 ("_fully_shard._fully_shard", "FSDPModule", "__call__")):
        def seen(loaded: types.ModuleType, name: str = name, method: str = method) -> None:
            _time(noted, getattr(loaded, name), method, FORWARD)

        once_imported(f"torch.distributed.fsdp.{module}", seen)


def _time(noted: RingNotes, owner: Any, name: str, phase: str) -> None:
    run = vars(owner).get(name)
    if run is None:  # of a class that is mixed into a model's own
        def run(self: Any, *args: Any, **options: Any) -> Any:
            return getattr(super(owner, self), name)(*args, **options)
    replace(owner, name, _timed(run, *_marks(noted, phase)))


def _timed(run: Callable[..., Any], begin: Callable[[], int], end: Callable[[int], None]) -> Callable[..., Any]:
    @functools.wraps(run)
    def timed(*args: Any, **options: Any) -> Any:
        number = begin()
        result = run(*args, **options)  # and no `finally`, which torch.compile could not leave for a moment
        end(number)
        return result

    return timed


def _marks(noted: RingNotes, phase: str) -> tuple[Callable[[], int], Callable[[int], None]]:
    """Functions that note the beginning and the end of a phase, which torch.compile leaves as they are."""
    def begin() -> int:
        return noted.begin(phase)

    def end(number: int) -> None:
        noted.end(number)

    return uncompiled(begin), uncompiled(end)


def _time_optimizers(noted: RingNotes) -> None:
    begin, end = _marks(noted, OPTIMIZER)
    open_steps: list[int] = []

    def before(*_: Any) -> None:
        open_steps.append(begin())

    def after(*_: Any) -> None:
        if open_steps:
            end(open_steps.pop())

    when_stopped(register_optimizer_step_pre_hook(before).remove)
    when_stopped(register_optimizer_step_post_hook(after).remove)


def _time_collector(noted: RingNotes) -> None:
    open_pauses: list[int] = []

    def collects(moment: str, about: dict[str, int]) -> None:
        if about["generation"] < FULL:
            return
        if moment == "start":
            open_pauses.append(noted.begin(COLLECTOR))
        elif open_pauses:
            noted.end(open_pauses.pop())

    gc.callbacks.append(collects)
    when_stopped(lambda: gc.callbacks.remove(collects))
