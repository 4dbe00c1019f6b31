"""L2: what no process group sees: new groups, collectives of objects, models in DDP, the lookup of ranks."""
from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.nn.parallel import DistributedDataParallel

from book.tap.group import calls_in, inside
from book.tap.log import LOG, Op
from book.tap.place import OF_OBJECTS, caller, caller_and_chain
from book.tap.replaced import replace, uncompiled


def install() -> None:
    """See these calls from now on."""
    for name in ("new_group", *OF_OBJECTS):
        seen = _seen(getattr(distributed_c10d, name))
        for module in (distributed_c10d, dist):
            replace(module, name, seen)
    destroys = _destroys(distributed_c10d.destroy_process_group)
    for module in (distributed_c10d, dist):
        replace(module, "destroy_process_group", destroys)
    replace(distributed_c10d, "get_group_rank", _named(distributed_c10d.get_group_rank))
    replace(DistributedDataParallel, "__init__", _wraps(DistributedDataParallel.__init__))
    replace(DistributedDataParallel, "__setstate__", _counts(DistributedDataParallel.__setstate__))
    replace(DistributedDataParallel, "__del__", _unwraps)
    replace(DistributedDataParallel, "forward", _runs(DistributedDataParallel.forward))


def _seen(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function made of other collectives, noted as one call."""
    signature = inspect.signature(function)

    @functools.wraps(function)
    def call(*args: Any, **options: Any) -> Any:
        op = None if inside.is_so else _op(function.__name__, signature, args, options)
        if op is None:
            return function(*args, **options)
        LOG.write(op)
        inside.is_so = True
        try:
            result = function(*args, **options)
            op.waited = True
            return result
        except Exception:
            LOG.withdraw(op)
            raise
        finally:
            inside.is_so = False

    return call


def _op(name: str, signature: inspect.Signature, args: tuple[Any, ...], options: dict[str, Any]) -> Op | None:
    """A call as an op; None if torch will refuse it, or if not all ranks of the group make it."""
    try:
        given = signature.bind(*args, **options).arguments
        if given.get("use_local_synchronization"):
            return None  # of new_group: then only the members call it
        group = given.get("group") or distributed_c10d._get_default_group()
        calls = calls_in(group)
        own = calls.of(group)
        members = tuple(sorted(given.get("ranks") or ()))
        root = None if name in ("new_group", "all_gather_object") else _root(given, own.ranks)
        by, lines = caller_and_chain(sys._getframe(1))
        return Op(name, name, own, next(calls.collectives), by.place, by.owner, root=root, members=members, lines=lines)
    except Exception:
        return None  # torch says why


def _root(given: dict[str, Any], ranks: tuple[int, ...]) -> int:
    """The root's rank in the world, from the arguments."""
    for side in ("src", "dst"):
        if given.get(f"group_{side}") is not None:
            return ranks[given[f"group_{side}"]]
        if given.get(side) is not None:
            return int(given[side])
    return 0


def _named(resolve: Callable[..., int]) -> Callable[..., int]:
    """How every function with a peer or a root finds the rank in the group, from that in the world."""
    @functools.wraps(resolve)
    def get_group_rank(group: Any, global_rank: int) -> int:
        for named in LOG.named:
            named(global_rank, distributed_c10d._get_default_group().size())
        return resolve(group, global_rank)

    return get_group_rank


def _destroys(destroy: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(destroy)
    def destroy_process_group(group: Any = None) -> None:
        known = list(distributed_c10d._world.pg_map)
        gone = [group] if group in known else known if group is None else []
        place = caller(sys._getframe(1)).place
        owns = [calls_in(each).of(each) for each in gone]  # torch forgets their ranks
        destroy(group)
        for own in owns:
            for told in LOG.destroyed:
                told(own, place)

    return destroy_process_group


def _wraps(init: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(init)
    def wrapped(self: Any, *args: Any, **options: Any) -> None:
        init(self, *args, **options)
        LOG.models.add(self)
        for told in LOG.wrapped:
            told(self)

    return wrapped


def _counts(set_state: Callable[..., None]) -> Callable[..., None]:
    """A copy of a model, whose __init__ nobody calls."""
    @functools.wraps(set_state)
    def copied(self: Any, state: Any) -> None:
        set_state(self, state)
        LOG.models.add(self)

    return copied


def _runs(forward: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(forward)
    def tapped(self: Any, *args: Any, **options: Any) -> Any:
        _tell(self)
        return forward(self, *args, **options)

    return tapped


def _tell(model: DistributedDataParallel) -> None:
    for told in LOG.forward:
        told(model)


uncompiled(_tell)


def _unwraps(model: DistributedDataParallel) -> None:
    for told in LOG.unwrapped:
        told(model)
