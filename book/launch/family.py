"""L2: the processes that ranks start: none of them outlives its launch.

On Linux a rank adopts orphans: when the parent of one of its descendants ends, the descendant becomes the rank's own
child. Once the rank itself has ended, it becomes a child of the server that ranks are forked from. So every process
that a rank has started can be found, even one in another session. Other systems adopt no orphans: there a rank's
process group is killed.
"""
from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from collections import defaultdict
from collections.abc import Collection, Iterable
from contextlib import suppress

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36  # from linux/prctl.h
LIMIT_S = 2.0  # a process that the system can't kill, as it waits for a disk, must not hold up a launch
ADOPTS = sys.platform == "linux"


def die_with_parent() -> None:
    """Have the system kill this process as soon as its parent dies, for whatever reason; Linux only."""
    if ADOPTS:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def adopt_orphans() -> None:
    """Become the parent of each descendant whose parent ends; Linux only. Children do not inherit this."""
    if ADOPTS:
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)


def end(roots: Collection[int]) -> None:
    """Kill these processes and all that they have started, including what they start meanwhile; not the caller."""
    for pid in roots:
        end_group(pid)
    stopped: set[int] = set()
    # A process that is stopped starts nothing more, so each round finds what was started before it was stopped.
    while new := _with_descendants(roots) - stopped - {os.getpid()}:
        _signal(new, signal.SIGSTOP)
        stopped |= new
    _signal(stopped or roots, signal.SIGKILL)


def end_group(leader: int) -> None:
    """Kill what is left of the process group that a rank leads."""
    # macOS raises PermissionError if all members are zombies.
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, signal.SIGKILL)


def end_children(parent: int, kept: Collection[int] = ()) -> None:
    """Kill the children of a process except the kept ones, and everything they have started; Linux only."""
    end_s = time.monotonic() + LIMIT_S
    # A child that dies by itself leaves its own children to the parent, so look again until there are none.
    while (children := set(_children().get(parent, ())) - set(kept)) and time.monotonic() < end_s:
        end(children)
        time.sleep(0.001)


def descendants(pid: int) -> dict[int, str]:
    """All living processes below this one, and the state of each, a letter; Linux only."""
    return {each: _state_and_parent(each)[0] for each in _with_descendants([pid]) - {pid}}


def is_gone(pid: int) -> bool:
    """Whether this process has ended; True where /proc does not say."""
    return _state_and_parent(pid)[0] in "XZ"


def is_stopped(pid: int) -> bool:
    """Whether a signal (SIGSTOP) has stopped this process; False where /proc does not say."""
    return _state_and_parent(pid)[0] == "T"


def is_asleep(pid: int) -> bool:
    """Whether the main thread of this process waits in the system; False where /proc does not say."""
    return _state_and_parent(pid)[0] in "SD"


def _signal(pids: Iterable[int], number: signal.Signals) -> None:
    for pid in pids:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def _with_descendants(roots: Iterable[int]) -> set[int]:
    """These processes and all below them."""
    children, found = _children(), list(roots)
    for pid in found:
        found += children.get(pid, ())
    return set(found) if children else set()


def _children() -> dict[int, list[int]]:
    """The children of each process, by what /proc says now; {} where there is none. Zombies are left out."""
    found: defaultdict[int, list[int]] = defaultdict(list)
    for name in os.listdir("/proc") if ADOPTS else ():
        if name.isdigit():
            state, parent = _state_and_parent(int(name))
            if state not in "ZX":
                found[parent].append(int(name))
    return found


def _state_and_parent(pid: int) -> tuple[str, int]:
    """A process's state, a letter, and its parent; ("X", 0) if it has ended."""
    try:
        file = os.open(f"/proc/{pid}/stat", os.O_RDONLY | os.O_CLOEXEC)  # of all processes, several times in a launch
    except OSError:
        return "X", 0
    try:
        state, parent = os.read(file, 4096).rpartition(b")")[2].split()[:2]
    except (OSError, ValueError):
        return "X", 0
    finally:
        os.close(file)
    return state.decode(), int(parent)
