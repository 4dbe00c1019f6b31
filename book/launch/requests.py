"""L2: requests of isend and irecv that a rank has dropped, and the lines that made them.

gloo cancels a message whose request Python has deleted. A request does not say where it was made, or whether the
program has waited for it; so each rank notes both, as long as the request lives.
"""
from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

CALLS = {"isend": "dst", "irecv": "src"}
ENDS = ("wait", "is_completed", "synchronize", "get_future")  # methods by which a program learns that it is done


class Made(NamedTuple):
    """What made a request: "isend" or "irecv", the peer, and the file and line of the call."""
    call: str
    peer: int | None
    filename: str
    line: int


_open: dict[int, tuple[Made, weakref.ref[Any]]] = {}  # requests not waited for, by their ids
_dropped: dict[Made, None] = {}  # a set that keeps its order


def watch(caller: Callable[[], tuple[str, int]]) -> None:
    """Have this process note the requests that isend and irecv of torch.distributed return.

    `caller()` gives the file and line of the learner's code that makes the call.
    """
    import torch.distributed as dist
    from torch.distributed import distributed_c10d

    from book.record.group import RecordedWork
    for name, side in CALLS.items():
        watched = _watched(getattr(distributed_c10d, name), side, caller)
        setattr(distributed_c10d, name, watched)
        setattr(dist, name, watched)
    for kind in (dist.Work, RecordedWork):
        for name in ENDS:
            setattr(kind, name, _ending(getattr(kind, name)))


def dropped() -> list[Made]:
    """The requests that this process has deleted before it had waited for them; each line once."""
    return list(_dropped)


def made(request: Any) -> Made | None:
    """What made a request that this process has not waited for; None if that is not known."""
    found = _open.get(id(request))
    return found[0] if found and found[1]() is request else None


def _watched(function: Callable[..., Any], side: str, caller: Callable[[], tuple[str, int]]) -> Callable[..., Any]:
    name = function.__name__

    @functools.wraps(function)
    def call(*args: Any, **options: Any) -> Any:
        request = function(*args, **options)
        if request is not None:
            key = id(request)
            made = Made(name, _peer(side, args, options), *caller())
            _open[key] = made, weakref.ref(request, functools.partial(_died, key))
        return request

    return call


def _peer(side: str, args: tuple[Any, ...], options: dict[str, Any]) -> int | None:
    """The peer's rank in the world; None for any rank."""
    place = options.get(f"group_{side}")
    if place is None:
        return args[1] if len(args) > 1 else options.get(side)
    import torch.distributed as dist
    return dist.get_process_group_ranks(options.get("group"))[place]


def _ending(wait: Callable[..., Any]) -> Callable[..., Any]:
    # A waiting rank is recognized by the name `wait` on its line: see where.BLOCKING_CALLS.
    @functools.wraps(wait)
    def end(self: Any, *args: Any, **options: Any) -> Any:
        done = wait(self, *args, **options)
        if done is not False:
            _open.pop(id(self), None)
        return done

    return end


def _died(key: int, reference: weakref.ref[Any]) -> None:
    found = _open.get(key)
    if found is not None and found[1] is reference:
        del _open[key]
        _dropped[found[0]] = None
