"""L2: where the audit sees what a program does with models, optimizers and data."""
from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.data import DistributedSampler, Subset
from torch.utils.data.dataloader import _BaseDataLoaderIter

from book.audit import orphans, reading
from book.audit.quiet import quietly
from book.audit.replicas import ReplicaNotes
from book.audit.summed import Sums
from book.tap.imported import once_imported
from book.tap.replaced import replace, when_stopped


def install(replicas: ReplicaNotes, sums: Sums) -> None:
    """See these calls from now on."""
    _before(DistributedDataParallel, "_pre_forward", lambda model, *inputs, **named: replicas.forward(
        model, (inputs, named)))
    for hook in (register_optimizer_step_pre_hook(replicas.before_step),
                 register_optimizer_step_pre_hook(sums.before_step),
                 register_optimizer_step_post_hook(replicas.after_step),
                 register_optimizer_step_post_hook(orphans.stepped)):
        when_stopped(hook.remove)
    _after(torch.optim.Optimizer, "__init__", lambda optimizer, *_: orphans.made(optimizer))
    once_imported("torch.distributed.fsdp._fully_shard._fsdp_state", functools.partial(_see_shards, replicas))
    for owner in (torch.nn.Module, torch.optim.Optimizer):
        _after(owner, "load_state_dict", lambda into, *_: replicas.loaded(into))
    _after(_BaseDataLoaderIter, "__init__", lambda iterator, _, loader: quietly(reading.opened)(iterator, loader))
    _after(_BaseDataLoaderIter, "_next_index", quietly(reading.asked))
    _after(_BaseDataLoaderIter, "__next__", quietly(reading.handed), quietly(reading.ended))
    _after(Subset, "__init__", lambda subset, *_: quietly(reading.parted)(subset))
    _before(DistributedSampler, "__iter__", quietly(reading.sharded))


def _see_shards(replicas: ReplicaNotes, module: Any) -> None:
    """See what fully_shard makes of a model, and its forwards."""
    from book.audit import sharded
    with suppress(AttributeError):  # another torch names them otherwise
        _after(module.FSDPState, "init", sharded.cut)
        _after(module.FSDPState, "_root_pre_forward", replicas.sharded)


def _before(owner: Any, name: str, told: Callable[..., None]) -> None:
    method = getattr(owner, name)

    @functools.wraps(method)
    def call(self: Any, *args: Any, **options: Any) -> Any:
        told(self, *args, **options)
        return method(self, *args, **options)

    replace(owner, name, call)


def _after(owner: Any, name: str, told: Callable[..., None], ended: Callable[[Any], None] | None = None) -> None:
    """Tell of each call what it is of, its result and its arguments; where it ends an iteration, that."""
    method = getattr(owner, name)

    @functools.wraps(method)
    def call(self: Any, *args: Any, **options: Any) -> Any:
        try:
            result = method(self, *args, **options)
        except StopIteration:
            if ended is not None:
                ended(self)
            raise
        told(self, result, *args)
        return result

    replace(owner, name, call)
