"""Kernels killed, restarted and interrupted while ranks run: what is left of the processes that they had started.

    python -m tests.stress [TIMES]     each of the three TIMES times (100), at random moments (the seed is printed)

Ranks start children, grandchildren, processes in sessions of their own, and daemons whose parent has left them.
Prints a line for each way to end, and exits with 1 if any process is alive `PATIENCE_S` later.
"""
from __future__ import annotations

import os
import random
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from jupyter_client.blocking.client import BlockingKernelClient
from jupyter_client.manager import KernelManager

MARK = "LOCKSTEP_STRESS"  # a variable that all processes of one round inherit
PATIENCE_S = 3.0
LATEST_S = 1.0  # after the cell was sent; by then all that the ranks start is running
LAUNCH = """
import os, subprocess, time
from book.launch import launch

def family():
    subprocess.Popen(["sleep", "600"])
    subprocess.Popen(["sh", "-c", "sleep 600 & sleep 600"])
    subprocess.Popen(["sh", "-c", "sleep 600 & sleep 600"], start_new_session=True)
    if os.fork() == 0:  # a daemon: its parent is gone at once
        os.setsid()
        if os.fork() == 0:
            time.sleep(600)
        os._exit(0)
    time.sleep(600)
"""
RUN = "launch(family, 2)"
CHECK = "print(list(launch(os.getpid, 2)) and 'launches again')"


def marked(mark: str) -> set[int]:
    """The processes, zombies left out, that were started with this mark."""
    return {pid for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if _carries(pid, f"{MARK}={mark}")}


def _carries(pid: int, word: str) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        return state not in "ZX" and word.encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except (OSError, IndexError):  # it has ended, or belongs to somebody else
        return False


def left_of(mark: str, kept: set[int]) -> int:
    """How many marked processes but the kept ones are alive once they have had time to end."""
    end_s = time.monotonic() + PATIENCE_S
    while (left := marked(mark) - kept) and time.monotonic() < end_s:
        time.sleep(0.05)
    return len(left)


@contextmanager
def kernel(mark: str) -> Iterator[tuple[KernelManager, BlockingKernelClient]]:
    """A kernel whose processes carry the mark; what is left of them at the end is killed."""
    manager = KernelManager(kernel_name="python3")
    manager.start_kernel(env={**os.environ, MARK: mark})
    client = manager.blocking_client()
    client.start_channels()
    try:
        client.wait_for_ready(timeout=60)
        client.execute_interactive(LAUNCH, timeout=60)
        yield manager, client
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)
        for pid in marked(mark):
            os.kill(pid, 9)


def end_once(end: Callable[[KernelManager], None], moment_s: float) -> int:
    """End a kernel whose ranks run, `moment_s` after they were launched; returns how many processes are left."""
    mark = uuid.uuid4().hex
    with kernel(mark) as (manager, client):
        client.execute_interactive(CHECK, timeout=60, output_hook=lambda message: None)  # torch is loaded now
        client.execute(RUN)
        time.sleep(moment_s)
        end(manager)
        return left_of(mark, kept={manager.provisioner.pid})  # a restarted kernel; a killed one is gone


def interrupt_often(moments_s: list[float]) -> list[int]:
    """Interrupt one kernel's launches; returns how many of the ranks' processes are left after each."""
    mark, left = uuid.uuid4().hex, []
    with kernel(mark) as (manager, client):
        client.execute_interactive(CHECK, timeout=60, output_hook=lambda message: None)
        kept = marked(mark)  # the kernel, and what its launches share
        for moment_s in moments_s:
            asked = client.execute(RUN)
            time.sleep(moment_s)
            manager.interrupt_kernel()
            left.append(left_of(mark, kept))
            wait_for_end(client, asked)
        printed: list[str] = []
        client.execute_interactive(CHECK, timeout=60, output_hook=lambda message: printed.append(
            str(message["content"])))
        assert "launches again" in "".join(printed), printed
    return left


def wait_for_end(client: BlockingKernelClient, asked: str) -> None:
    """Wait for the reply to a cell: a kernel drops, without a word, what it gets before a failed cell has ended."""
    while client.get_shell_msg(timeout=60)["parent_header"].get("msg_id") != asked:
        pass


def kill(manager: KernelManager) -> None:
    """SIGKILL for the kernel alone, as the system does when memory runs out."""
    os.kill(manager.provisioner.pid, 9)  # type: ignore[union-attr]


def restart(manager: KernelManager) -> None:
    """What JupyterLab's "Restart Kernel" comes to: SIGKILL for the kernel's process group, and a new kernel."""
    manager.restart_kernel(now=True)


def survivors(times: int, seed: int) -> dict[str, list[int]]:
    """How many processes were left each time, for each way to end."""
    draw = random.Random(seed)
    moments = [[draw.uniform(0, LATEST_S) for _ in range(times)] for _ in range(3)]
    return {"killed kernels": [end_once(kill, moment_s) for moment_s in moments[0]],
            "restarted kernels": [end_once(restart, moment_s) for moment_s in moments[1]],
            "interrupted launches": interrupt_often(moments[2])}


if __name__ == "__main__":
    SEED = random.SystemRandom().randrange(10 ** 6)
    TOLD = survivors(int(sys.argv[1]) if len(sys.argv) > 1 else 100, SEED)
    for way, left in TOLD.items():
        print(f"{len(left)} {way}: {sum(map(bool, left))} left processes behind after {PATIENCE_S:g} s, "
              f"{sum(left)} in all (seed {SEED})")
    sys.exit(any(map(any, TOLD.values())))
