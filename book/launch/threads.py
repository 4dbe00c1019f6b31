"""L2: the threads of this process as the operating system sees them, C++'s own included; Linux only (/proc)."""
from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

# The kernel encodes a thread's CPU clock as its inverted id, shifted left by three bits that say "per thread, precise".
_THREAD_CLOCK = 0b110
_TASKS = "/proc/self/task"
# This RPC thread polls for messages in a busy loop. Its CPU use is no sign of progress, and it gives up its core only
# when another thread preempts it.
_POLLER = "TP_SHM_reactor"
# This thread of gloo polls without end if something has arrived that nobody takes: the request was dropped, or another
# thread holds its lock. In a transfer, the sender's thread shows progress by the bytes that it has written.
_TRANSPORT = "gloo_tcp_loop"
# A waiting thread uses at most this share of a core. Each of gloo's threads, one per process group, uses 0.4 % while it
# waits, and more on a loaded machine.
_IDLE_SHARE, _IDLE_NS = 0.03, 5e6
_WATCH_S = 0.05


@dataclass(frozen=True)
class ThreadUse:
    """What a thread has used so far: CPU time, and for gloo's transport the bytes that it has written, else None."""
    cpu_ns: int
    written: int | None = None


def are_known() -> bool:
    """Whether the operating system tells what each thread does."""
    return os.path.isdir(_TASKS)


def used() -> dict[int, ThreadUse]:
    """What each thread except the RPC poller has used so far, by thread id."""
    found = {}
    for thread in map(int, os.listdir(_TASKS)):
        try:
            name = _name(thread)
            if name != _POLLER:
                found[thread] = ThreadUse(_clock_ns(thread), _written(thread) if name == _TRANSPORT else None)
        except OSError:
            continue  # it has just ended
    return found


def worked(before: dict[int, ThreadUse], after: dict[int, ThreadUse], elapsed_s: float) -> bool:
    """Whether any thread except the caller has done more between two measurements than waiting needs.

    Written bytes count however little CPU time they took: on a loaded machine a transfer is slow, but it goes on.
    """
    me = threading.get_native_id()
    wrote = any(use.written is not None and use.written != _of(thread, before).written
                for thread, use in after.items() if thread != me)
    return wrote or any(use.written is None for thread, use in _busy(before, after, elapsed_s) if thread != me)


def polled(before: dict[int, ThreadUse], after: dict[int, ThreadUse], elapsed_s: float) -> bool:
    """Whether gloo's transport has polled between two measurements for something that has arrived and nobody takes."""
    return any(use.written is not None and use.written == _of(thread, before).written
               for thread, use in _busy(before, after, elapsed_s))


def _busy(before: dict[int, ThreadUse], after: dict[int, ThreadUse], elapsed_s: float,
          ) -> Iterator[tuple[int, ThreadUse]]:
    """The threads that have used more CPU time between two measurements than waiting needs."""
    limit_ns = 1e9 * _IDLE_SHARE * elapsed_s + _IDLE_NS
    yield from ((thread, use) for thread, use in after.items() if use.cpu_ns - _of(thread, before).cpu_ns > limit_ns)


def _of(thread: int, before: dict[int, ThreadUse]) -> ThreadUse:
    return before.get(thread, ThreadUse(0))


def stand_still() -> tuple[bool, bool]:
    """Whether the main thread is idle for a moment, and whether all other threads are idle too.

    (True, True) if the operating system does not tell.
    """
    if not are_known():
        return True, True
    start_s, before, main = time.monotonic(), used(), os.getpid()
    looks = [_wanting_core()]
    for _ in range(2):
        time.sleep(_WATCH_S / 2)
        looks.append(_wanting_core())
    after, elapsed_s = used(), time.monotonic() - start_s
    main_stands = before[main] == after[main] and main not in looks[-1]
    # On a loaded machine a thread that computes may get no core all the while. One that wakes up for a moment is not
    # in the queue at every look.
    queued = set.intersection(*looks) - {threading.get_native_id()}
    return main_stands, main_stands and not queued and not worked(before, after, elapsed_s)


def _wanting_core() -> set[int]:
    """The runnable threads, except those that poll."""
    return {thread for thread, fields in _statuses() if _is_runnable(fields) and not _polls(fields)}


def _clock_ns(thread: int) -> int:
    return time.clock_gettime_ns(~thread << 3 | _THREAD_CLOCK)


def _name(thread: int) -> str:
    with open(f"{_TASKS}/{thread}/comm") as file:
        return file.read().strip()


def _written(thread: int) -> int | None:
    """The bytes that a thread has written, to sockets too; None if the kernel does not count them."""
    try:
        with open(f"{_TASKS}/{thread}/io") as file:
            return int(dict(line.split(":", 1) for line in file)["wchar"])
    except OSError:
        return None


def queue() -> dict[int, tuple[bool, int]]:
    """By thread id: whether the thread is runnable, and a number that grows whenever the thread runs."""
    found = {}
    for thread, fields in _statuses():
        num_turns = int(fields["voluntary_ctxt_switches"]) + int(fields["nonvoluntary_ctxt_switches"])
        try:
            found[thread] = _is_runnable(fields), _clock_ns(thread) if _polls(fields) else num_turns
        except OSError:
            continue  # it has just ended
    return found


def _statuses() -> Iterator[tuple[int, dict[str, str]]]:
    """What the kernel says of each thread: its name, its state, how often it has left its core."""
    for thread in map(int, os.listdir(_TASKS)):
        try:
            with open(f"{_TASKS}/{thread}/status") as file:
                yield thread, dict(line.split(":", 1) for line in file)
        except OSError:
            continue  # it has just ended


def _is_runnable(fields: Mapping[str, str]) -> bool:
    return fields["State"].strip().startswith("R")


def _polls(fields: Mapping[str, str]) -> bool:
    return fields["Name"].strip() in (_POLLER, _TRANSPORT)
