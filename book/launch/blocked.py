"""L2: waits inside one process: for a lock, a thread, a queue or a store, which torch.distributed does not see."""
from __future__ import annotations

import ast
import os
import re
import sysconfig
from collections.abc import Sequence
from types import FrameType

from book.launch import pending, where
from book.launch.stacks import StackLine
from book.tap.place import is_learners
from book.waiting.doing import Doing, Kind

# Methods written in C that wait until another thread, or another rank, does something.
_WAITING = {"acquire", "flock", "get", "join", "lockf", "put", "result"}
_WITH_LOCK = re.compile(r"(async )?with [\w.\[\]]+( as \w+)?(,.*)?:")
_STDLIB = os.path.realpath(sysconfig.get_path("stdlib")) + os.sep
_WAITS_IN = tuple(_STDLIB + name for name in ("threading.py", "queue.py"))
_DATA_LOADER = "/torch/utils/data/"
# What a thread waits for in a method, by the method's full name, else by its last part.
_METHODS = {
    "acquire": Kind.LOCK, "get": Kind.ITEM, "put": Kind.ROOM, "join": Kind.JOIN, "Queue.join": Kind.TASKS,
    "Event.wait": Kind.EVENT, "Condition.wait": Kind.CONDITION, "Barrier.wait": Kind.BARRIER,
    "Future.result": Kind.FUTURE,
}


def without_limit(lines: Sequence[StackLine]) -> bool:
    """Whether a thread at these lines, if it uses no CPU, waits for another thread and has set no time limit."""
    if with_limit(lines):
        return False
    return _in_threading(lines[-1]) or (is_learners(lines[-1].filename) and _waits_in_c(lines[-1]))


def with_limit(lines: Sequence[StackLine]) -> bool:
    """Whether a thread at these lines waits for another thread for a limited time, as a Timer does."""
    # Thread.join passes its time limit on even if that is None.
    last = lines[-2] if lines[-1].function == "_wait_for_tstate_lock" else lines[-1]
    return (_in_threading(last) or is_learners(last.filename)) and (
        "timeout" in last.source and "_handle.join" not in last.source)


def _in_threading(line: StackLine) -> bool:
    return os.path.realpath(line.filename).startswith(_WAITS_IN)


def _waits_in_c(line: StackLine) -> bool:
    return not line.calls().isdisjoint(_WAITING) or takes_lock(line)


def takes_lock(line: StackLine) -> bool:
    """Whether a thread whose innermost line this is waits in C for what a `with` takes: a lock."""
    return bool(_WITH_LOCK.match(line.source))


def describe(frames: Sequence[FrameType]) -> Doing:
    """What a thread with these frames, which uses no CPU, waits for."""
    own = where.own_frame(frames)
    inside = frames[frames.index(own) + 1:]
    if any(_DATA_LOADER in frame.f_code.co_filename for frame in inside):
        return Doing(Kind.OTHER, "DataLoader")
    if inside:
        method = _method(inside[0])
        return Doing(kind(method), f"{method}()")
    call = pending.current_call(own)
    if call is not None:
        keys, called = pending.keys_of_store(call, own), ast.unparse(call.func)
        return Doing(Kind.KEYS, keys=keys) if keys else Doing(kind(called), called)
    return Doing(Kind.LOCK if takes_lock(where.line_of(own)) else Kind.IDLE)


def _method(frame: FrameType) -> str:
    """The name of a function, with its class: "Queue.get", "run"."""
    name = frame.f_code.co_name
    return f"{type(frame.f_locals['self']).__name__}.{name}" if "self" in frame.f_locals else name


def waiting_call(line: StackLine) -> str | None:
    """The call in a line that waits, as it is written: "lock.acquire"; None if there is none, or several."""
    try:
        called = [ast.unparse(node.func) for node in ast.walk(ast.parse(line.source)) if isinstance(node, ast.Call)]
    except SyntaxError:
        called = list(line.calls())
    found = [name for name in called if name.rpartition(".")[2] in _WAITING]
    return found[0] if len(found) == 1 else None


def kind(method: str) -> Kind:
    """What a method waits for."""
    return _METHODS.get(method) or _METHODS.get(method.rpartition(".")[2], Kind.OTHER)
