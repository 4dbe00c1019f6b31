"""L2: the threads of this process as the operating system sees them, C++'s own included; Linux only (/proc)."""
from __future__ import annotations

import os
import threading
import time

# The kernel's name for the CPU clock of one thread: its id, inverted, above these three bits (per thread, precise).
_THREAD_CLOCK = 0b110
_TASKS = "/proc/self/task"
# Looks for messages of RPC without end and without a pause: that it is busy does not say that anything moves, and it
# leaves its core only when another thread takes it.
_POLLER = "TP_SHM_reactor"
# A thread that only waits uses no more than this share of a core. Each of gloo's, one for every process group, takes
# 0.4 % for that, and more on a loaded machine.
_IDLE_SHARE, _IDLE_NS = 0.03, 5e6
_WATCH_S = 0.05


def cpu_ns() -> dict[int, int]:
    """CPU time used so far by each thread whose work means something, in nanoseconds by thread id."""
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
    """Whether a thread, other than the calling one, has used more of a core between two looks than waiting takes."""
    limit_ns = 1e9 * _IDLE_SHARE * elapsed_s + _IDLE_NS
    return any(used - before_ns.get(thread, 0) > limit_ns
               for thread, used in after_ns.items() if thread != threading.get_native_id())


def stand_still() -> tuple[bool, bool]:
    """Whether the main thread is seen to use and to want no core for a moment; whether no other one works either.

    True where the operating system does not say.
    """
    if not os.path.isdir(_TASKS):
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
    """By thread id: whether it runs or would if it had a core, and a number that grows when it has had one."""
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
