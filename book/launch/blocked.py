"""L2: waits inside one process: for a lock, a thread, a queue or a store, which torch.distributed does not see."""
from __future__ import annotations

import ast
import os
import re
import sysconfig
from collections.abc import Sequence
from types import FrameType

from book.launch import pending, where
from book.launch.stacks import Line

# Methods written in C that wait until another thread, or another rank, does something.
_WAITING = {"acquire", "get", "join", "put", "result"}
_WITH_LOCK = re.compile(r"(async )?with [\w.\[\]]+( as \w+)?(,.*)?:")
_STDLIB = os.path.realpath(sysconfig.get_path("stdlib")) + os.sep
_WAITS_IN = tuple(_STDLIB + name for name in ("threading.py", "queue.py"))
_DATA_LOADER = "/torch/utils/data/"


def without_limit(lines: Sequence[Line]) -> bool:
    """Whether a thread at these lines, if it uses no CPU, waits for another thread and has set no time limit."""
    if with_limit(lines):
        return False
    return _in_threading(lines[-1]) or (where.is_learners(lines[-1].filename) and _waits_in_c(lines[-1]))


def with_limit(lines: Sequence[Line]) -> bool:
    """Whether a thread at these lines waits for another thread for a limited time, as a Timer does."""
    # Thread.join passes a limit on even if it has none.
    last = lines[-2] if lines[-1].function == "_wait_for_tstate_lock" else lines[-1]
    return (_in_threading(last) or where.is_learners(last.filename)) and (
        "timeout" in last.source and "_handle.join" not in last.source)


def _in_threading(line: Line) -> bool:
    return os.path.realpath(line.filename).startswith(_WAITS_IN)


def _waits_in_c(line: Line) -> bool:
    return not line.calls().isdisjoint(_WAITING) or bool(_WITH_LOCK.match(line.source))


def describe(frames: Sequence[FrameType]) -> str:
    """What a thread with these frames, which uses no CPU, waits for: "waits in Thread.join()", "waits for a lock"."""
    own = where.own_frame(frames)
    inside = frames[frames.index(own) + 1:]
    if any(_DATA_LOADER in frame.f_code.co_filename for frame in inside):
        return "waits in DataLoader"
    if inside:
        return f"waits in {_called(inside[0])}"
    call = pending.current_call(own)
    if call is not None:
        return f"waits in {ast.unparse(call.func)}"
    is_with = _WITH_LOCK.match(where.line_of(own).source)
    return "waits for a lock" if is_with else "does not use any CPU time"


def _called(frame: FrameType) -> str:
    """A function in words: "Queue.get()", "run()"."""
    name = frame.f_code.co_name
    return f"{type(frame.f_locals['self']).__name__}.{name}()" if "self" in frame.f_locals else f"{name}()"
