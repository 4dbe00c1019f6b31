"""L2: what a launch is asked to run: arguments that cannot work are refused in one sentence, the rest is pickled."""
from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

MAX_RANKS = 64


def check(fn: Any, world_size: Any, args: tuple, timeout_s: float, hang_s: float, allow_many_ranks: bool) -> None:
    """Raise TypeError or ValueError for a launch that cannot work, in words that say what to do."""
    if not callable(fn):
        raise TypeError(f"launch needs a function to run on the ranks, not {fn!r}: launch(fn, world_size, *args)")
    if isinstance(world_size, bool) or not isinstance(world_size, int):
        raise TypeError(f"world_size is a number of processes, not {world_size!r}")
    if world_size < 1:
        raise ValueError(f"world_size must be at least 1, not {world_size}")
    if world_size > MAX_RANKS and not allow_many_ranks:
        raise ValueError(f"{world_size} ranks are {world_size} processes: pass allow_many_ranks=True to start more "
                         f"than {MAX_RANKS}")
    for name, value in (("timeout_s", timeout_s), ("hang_s", hang_s)):
        if not value > 0:
            raise ValueError(f"{name} must be more than 0 seconds, not {value}")
    _check_arguments(fn, args)


def _check_arguments(fn: Callable[..., Any], args: tuple) -> None:
    try:
        signature = inspect.signature(fn)
    except (TypeError, ValueError):
        return  # some built-in functions do not tell
    try:
        signature.bind(*args)
    except TypeError as error:
        name = getattr(fn, "__name__", "the function")
        raise TypeError(f"{name}{signature} cannot be called with {len(args)} arguments ({error}): "
                        "launch(fn, world_size, *args) passes exactly args") from None


def pickled(fn: Callable[..., Any], args: tuple) -> bytes:
    """The call, pickled by value; raises TypeError that names what cannot travel to another process."""
    import cloudpickle
    try:
        return cloudpickle.dumps((fn, args))
    except Exception as error:
        culprit = next((name for name, value in _parts(fn, args) if not _travels(value)), "the function")
        raise TypeError(f"{culprit} cannot be sent to the ranks ({error}): create it inside the function") from None


def _parts(fn: Callable[..., Any], args: tuple) -> Iterator[tuple[str, Any]]:
    """What a call carries with it, by the name that a reader knows it by."""
    for position, value in enumerate(args, start=1):
        yield f"argument {position}", value
    if inspect.isfunction(fn):
        variables = inspect.getclosurevars(fn)
        for name, value in {**variables.nonlocals, **variables.globals}.items():
            yield f"{name!r}, which {fn.__name__} uses,", value


def _travels(value: Any) -> bool:
    import cloudpickle
    try:
        cloudpickle.dumps(value)
    except Exception:
        return False
    return True
