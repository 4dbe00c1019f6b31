"""L2: the threads of this process as the operating system sees them, C++'s own included; Linux only (/proc)."""
from __future__ import annotations

import os
import threading
import time

# The kernel encodes a thread's CPU clock as its inverted id, shifted left by three bits that say "per thread, precise".
_THREAD_CLOCK = 0b110
_TASKS = "/proc/self/task"
# This RPC thread polls for messages in a busy loop. Its CPU use is no sign of progress, and it gives up its core only
# when another thread preempts it.
_POLLER = "TP_SHM_reactor"
# A waiting thread uses at most this share of a core. Each of gloo's threads, one per process group, uses 0.4 % while it
# waits, and more on a loaded machine.
_IDLE_SHARE, _IDLE_NS = 0.03, 5e6
_WATCH_S = 0.05


def are_known() -> bool:
    """Whether the operating system tells what each thread does."""
    return os.path.isdir(_TASKS)


def has_children() -> bool:
    """Whether this process has started other processes that still run."""
    for process in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{process}/stat", "rb") as file:
                state, parent = file.read().rpartition(b")")[2].split()[:2]
        except OSError:
            continue  # it has just ended
        if int(parent) == os.getpid() and state != b"Z":
            return True
    return False


def cpu_ns() -> dict[int, int]:
    """CPU time used so far by each thread except the RPC poller, in nanoseconds by thread id."""
    used = {}
    for thread in map(int, os.listdir(_TASKS)):
        try:
            with open(f"{_TASKS}/{thread}/comm") as file:
                if file.read().strip() != _POLLER:
                    used[thread] = _clock_ns(thread)
        except OSError:
            continue  # it has just ended
    return used


def worked(before_ns: dict[int, int], after_ns: dict[int, int], elapsed_s: float) -> bool:
    """Whether any thread except the caller has used more CPU time between two measurements than waiting needs."""
    limit_ns = 1e9 * _IDLE_SHARE * elapsed_s + _IDLE_NS
    return any(used - before_ns.get(thread, 0) > limit_ns
               for thread, used in after_ns.items() if thread != threading.get_native_id())


def stand_still() -> tuple[bool, bool]:
    """Whether the main thread is idle for a moment, and whether all other threads are idle too.

    (True, True) if the operating system does not tell.
    """
    if not are_known():
        return True, True
    start_s, before_ns, main = time.monotonic(), cpu_ns(), os.getpid()
    time.sleep(_WATCH_S)
    after_ns, elapsed_s = cpu_ns(), time.monotonic() - start_s
    wants_core, _ = queue()[main]
    main_stands = before_ns[main] == after_ns[main] and not wants_core
    return main_stands, main_stands and not worked(before_ns, after_ns, elapsed_s)


def _clock_ns(thread: int) -> int:
    return time.clock_gettime_ns(~thread << 3 | _THREAD_CLOCK)


def queue() -> dict[int, tuple[bool, int]]:
    """By thread id: whether the thread is runnable, and a number that grows whenever the thread runs."""
    found = {}
    for thread in map(int, os.listdir(_TASKS)):
        try:
            with open(f"{_TASKS}/{thread}/status") as file:
                fields = dict(line.split(":", 1) for line in file)
            num_turns = int(fields["voluntary_ctxt_switches"]) + int(fields["nonvoluntary_ctxt_switches"])
            had_core = _clock_ns(thread) if fields["Name"].strip() == _POLLER else num_turns
        except OSError:
            continue  # it has just ended
        found[thread] = fields["State"].strip().startswith("R"), had_core
    return found
