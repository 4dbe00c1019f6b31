"""L2: the threads of this process as the operating system sees them, C++'s own included; Linux only (/proc)."""
from __future__ import annotations

import os
import time
from collections.abc import Iterator

# The kernel's name for the CPU clock of one thread: its id, inverted, above these three bits (per thread, precise).
_THREAD_CLOCK = 0b110
_TASKS = "/proc/self/task"
# Looks for messages of RPC without end and without a pause: that it is busy does not say that anything moves.
_POLLER = "TP_SHM_reactor"


def cpu_ns() -> dict[int, int]:
    """CPU time used by each thread so far, in nanoseconds by thread id."""
    used = {}
    for thread in _threads():
        try:
            used[thread] = time.clock_gettime_ns(~thread << 3 | _THREAD_CLOCK)
        except OSError:
            continue  # it has just ended
    return used


def queue() -> dict[int, tuple[bool, int]]:
    """By thread id: whether it runs or would if it had a core, and how often it has left a core so far."""
    found = {}
    for thread in _threads():
        try:
            with open(f"{_TASKS}/{thread}/status") as file:
                fields = dict(line.split(":", 1) for line in file)
        except OSError:
            continue  # it has just ended
        num_turns = int(fields["voluntary_ctxt_switches"]) + int(fields["nonvoluntary_ctxt_switches"])
        found[thread] = fields["State"].strip().startswith("R"), num_turns
    return found


def _threads() -> Iterator[int]:
    """Ids of the threads whose work means something."""
    for thread in map(int, os.listdir(_TASKS)):
        try:
            with open(f"{_TASKS}/{thread}/comm") as file:
                name = file.read().strip()
        except OSError:
            continue  # it has just ended
        if name != _POLLER:
            yield thread
