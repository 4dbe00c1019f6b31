"""L2: waits inside one process: for a lock, a thread, a queue or a store, which torch.distributed does not see."""
from __future__ import annotations

import ast
import os
import re
import sysconfig
from collections.abc import Mapping, Sequence
from types import FrameType

from book.launch import pending, where
from book.launch.stacks import Line

# Methods written in C that wait until another thread, or another rank, does something.
_WAITING = {"acquire", "flock", "get", "join", "lockf", "put", "result"}
_WITH_LOCK = re.compile(r"(async )?with [\w.\[\]]+( as \w+)?(,.*)?:")
_STDLIB = os.path.realpath(sysconfig.get_path("stdlib")) + os.sep
_WAITS_IN = tuple(_STDLIB + name for name in ("threading.py", "queue.py"))
_DATA_LOADER = "/torch/utils/data/"
# What would end a wait, by the words of `describe`; another thread of the rank would have to do it.
_ENDS = {
    "a lock": "release it", "acquire": "release it", "get": "put an item in", "put": "take an item out",
    "Event.wait": "set it", "Condition.wait": "notify it", "Barrier.wait": "come to it",
    "Future.result": "complete it", "Queue.join": "call task_done",
}
_FUTURE = "waits in Future.result()"


def without_limit(lines: Sequence[Line]) -> bool:
    """Whether a thread at these lines, if it uses no CPU, waits for another thread and has set no time limit."""
    if with_limit(lines):
        return False
    return _in_threading(lines[-1]) or (where.is_learners(lines[-1].filename) and _waits_in_c(lines[-1]))


def with_limit(lines: Sequence[Line]) -> bool:
    """Whether a thread at these lines waits for another thread for a limited time, as a Timer does."""
    # Thread.join passes its time limit on even if that is None.
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
        key = pending.key_of_store(call, own)
        return f"waits {key}" if key else f"waits in {ast.unparse(call.func)}"
    is_with = _WITH_LOCK.match(where.line_of(own).source)
    return "waits for a lock" if is_with else "does not use any CPU time"


def _called(frame: FrameType) -> str:
    """A function in words: "Queue.get()", "run()"."""
    name = frame.f_code.co_name
    return f"{type(frame.f_locals['self']).__name__}.{name}()" if "self" in frame.f_locals else f"{name}()"


def why(doing: str, others: Mapping[str, str]) -> str | None:
    """Why a rank's main thread, which is `doing` this, waits inside its own process; None if that is not known.

    `others`: what its other threads are doing, by their names.
    """
    if doing == _FUTURE and others and set(others.values()) == {_FUTURE}:
        return (f"{doing}, and so {'do its threads' if len(others) > 1 else 'does its thread'} {' and '.join(others)}: "
                "the pool has no thread left to run what they wait for")
    named = [f"its thread {name} {does}" for name, does in others.items()]
    in_locks = [name for name, does in others.items() if _ended_by(does) == "release it"]
    if len(in_locks) > 1 and "join" in doing:
        return (f"its threads {' and '.join(in_locks)} each wait for a lock that another holds: take the locks in the "
                "same order in all threads")
    if others:
        return f"{doing}, and {' and '.join(named)}" if all(map(_ended_by, others.values())) else None
    end = _ended_by(doing)
    return f"{doing}, and has no other thread that could {end}" if end else None


def _ended_by(doing: str) -> str | None:
    """What would end such a wait: "release it" for "waits for a lock"."""
    what = re.sub(r"^waits (in|for) |\(\)$", "", doing)
    return _ENDS.get(what) or _ENDS.get(what.rpartition(".")[2]) if what != doing else None
