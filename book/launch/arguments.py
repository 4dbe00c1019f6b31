"""L2: check the arguments of a launch, with one clear sentence for each one that cannot work, and pickle the call."""
from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from numbers import Integral, Real
from types import CodeType, ModuleType
from typing import Any

from book.launch import transfer
from book.launch.transfer import Packed, SharedFile

MAX_RANKS = 64
CACHED = type(functools.lru_cache(len))


def check_call(fn: Any, world_size: Any, args: tuple[Any, ...], allow_many_ranks: bool) -> None:
    """Raise TypeError or ValueError for a call that cannot work, with a message that says what to do."""
    if not callable(fn):
        raise TypeError(f"launch needs a function to run on the ranks, not {fn!r}: launch(fn, world_size, *args)")
    if isinstance(world_size, bool) or not isinstance(world_size, Integral):
        raise TypeError(f"world_size is a number of processes, not {world_size!r}: pass a whole number, such as 4")
    world_size = int(world_size)
    if world_size < 1:
        raise ValueError(f"world_size must be at least 1, not {world_size}")
    if world_size > MAX_RANKS and not allow_many_ranks:
        raise ValueError(f"{world_size} ranks are {world_size} processes: pass allow_many_ranks=True to start more "
                         f"than {MAX_RANKS}")
    _check_kind(fn)
    _check_arguments(fn, args)


def check_options(timeout_s: Any, hang_s: Any, audit: Any, on_line: Any, env: Any) -> None:
    """Raise TypeError or ValueError for options that would fail only later, with a message that says what to do."""
    for name, value in (("timeout_s", timeout_s), ("hang_s", hang_s)):
        if isinstance(value, bool) or not isinstance(value, Real):
            raise TypeError(f"{name} is a number of seconds, not {value!r}: pass a number, such as 10")
        if not float(value) > 0:
            raise ValueError(f"{name} must be more than 0 seconds, not {value}")
    if not isinstance(audit, int) or audit < 0:
        raise ValueError(f"audit is True, False or a number of steps, not {audit!r}: write audit=100 to look at models "
                         "after each 100th step")
    if on_line is not None and not _takes_two(on_line):
        raise TypeError(f"on_line must be a function of a rank and a line, not {on_line!r}: "
                        "write on_line=lambda rank, line: print(rank, line)")
    if env is not None and not isinstance(env, Mapping):
        raise TypeError(f"env must be a dict of environment variables, not {env!r}: write env={{'NAME': 'value'}}")
    for name, value in (env or {}).items():
        _check_variable(name, value)


def _check_variable(name: Any, value: Any) -> None:
    if not isinstance(name, str):
        raise TypeError(f"names in env must be text, not {name!r}: write env={{'NAME': 'value'}}")
    if not name or "=" in name or "\0" in name:
        raise ValueError(f"{name!r} in env cannot name an environment variable: leave out '=' and write "
                         "env={'NAME': 'value'}")
    if not isinstance(value, (str, Real)):
        raise TypeError(f"env[{name!r}] must be text or a number, not {value!r}: leave it out or pass a string")
    if "\0" in str(value):
        raise ValueError(f"env[{name!r}] must not contain the character '\\0': leave it out")


def _takes_two(function: Any) -> bool:
    if not callable(function):
        return False
    try:
        inspect.signature(function).bind(0, "")
    except ValueError:
        return True  # some built-in functions have no signature
    except TypeError:
        return False
    return True


def _check_kind(fn: Callable[..., Any]) -> None:
    """Reject functions that do not run when they are called: async functions and generators."""
    name = getattr(fn, "__name__", "the function")
    if inspect.iscoroutinefunction(fn):
        raise TypeError(f"{name} is an async function, which a call does not run: launch one that calls "
                        f"asyncio.run({name}(...))")
    if inspect.isgeneratorfunction(fn) or inspect.isasyncgenfunction(fn):
        raise TypeError(f"{name} yields, so a call does not run it: collect the values in a list and return that")


def _check_arguments(fn: Callable[..., Any], args: tuple[Any, ...]) -> None:
    try:
        signature = inspect.signature(fn)
    except (TypeError, ValueError):
        return  # some built-in functions have no signature
    try:
        signature.bind(*args)
    except TypeError as error:
        name = getattr(fn, "__name__", "the function")
        raise TypeError(f"{name}{signature} cannot be called with {len(args)} arguments ({error}): "
                        "give its arguments after world_size, as in launch(fn, world_size, *args)") from None


def packed(fn: Callable[..., Any], args: tuple[Any, ...], file: SharedFile) -> Packed:
    """The call, pickled by value; raises TypeError that names what cannot be pickled."""
    try:
        # Copied: some functions resize the tensors that they get.
        return transfer.packed((fn, args), file, _reduced(), copied=True)
    except Exception as error:
        culprit = next((name for name, value in _parts(fn, args) if not _can_be_pickled(value)), "part of the call")
        raise TypeError(f"{culprit} cannot be sent to the ranks ({error}): create it inside the function") from None


def _reduced() -> Callable[[Any], Any]:
    """How cached functions, modules and code are pickled: modules by name, code with the name of its file.

    Cloudpickle guesses which submodules a function uses, and pickles them too. A function that uses `dist` and a
    variable `config` gets torch.distributed.config, a module of its own type, which cloudpickle cannot pickle.
    """
    import cloudpickle

    by_value = {"__main__", *cloudpickle.list_registry_pickle_by_value()}

    def reduced(obj: Any) -> Any:
        if isinstance(obj, CACHED) and obj.__module__ in by_value:
            return _cached, (obj.__wrapped__, obj.cache_parameters())
        if isinstance(obj, ModuleType) and type(obj) is not ModuleType:
            return importlib.import_module, (obj.__name__,)
        if isinstance(obj, CodeType):
            return _code(*cloudpickle.Pickler.dispatch_table[CodeType](obj), filename=obj.co_filename)
        return NotImplemented

    return reduced


def _code(make: Any, args: tuple[Any, ...], *, filename: str) -> tuple[Any, tuple[Any, ...]]:
    """How code is pickled: cloudpickle 3.1.3 replaces the file's name, from which messages quote the lines."""
    return make, tuple(filename if arg == "<dynamic-code>" else arg for arg in args)


def _cached(fn: Callable[..., Any], parameters: dict[str, Any]) -> Callable[..., Any]:
    """Rebuild a reader's cached function: pickle would look for its name in the rank's own `__main__`."""
    return functools.lru_cache(**parameters)(fn)


def _parts(fn: Callable[..., Any], args: tuple[Any, ...]) -> Iterator[tuple[str, Any]]:
    """The objects that a call sends to the ranks, with the names that a reader knows them by."""
    for position, value in enumerate(args, start=1):
        yield f"argument {position}", value
    if inspect.isfunction(fn):
        variables = inspect.getclosurevars(fn)
        for name, value in {**variables.nonlocals, **variables.globals}.items():
            yield f"{name!r}, which {fn.__name__} uses,", value


def _can_be_pickled(value: Any) -> bool:
    try:
        transfer.pickled(value, _reduced())
    except Exception:
        return False
    return True
