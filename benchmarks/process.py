"""Programs that are timed from outside, and ended with everything that they have started."""
from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.report import Unavailable

ROOT = Path(__file__).resolve().parents[1]
LIMIT_S, LEAVE_LIMIT_S = 300.0, 35.0  # torchrun gives its ranks 30 s to end


def time_program(command: Sequence[str]) -> tuple[float, str]:
    """Run `command` in the repository's root; returns the seconds from its start to its end, and its stdout.

    Raises `Unavailable` with the last line of its stderr when it fails or takes longer than `LIMIT_S`.
    """
    start_s = time.perf_counter()
    with started(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as program:
        try:
            said, complaints = program.communicate(timeout=LIMIT_S)
        except subprocess.TimeoutExpired:
            raise Unavailable(f"not done after {LIMIT_S:.0f} s") from None
    if program.returncode:
        raise Unavailable((complaints.strip().splitlines() or [f"exit status {program.returncode}"])[-1])
    return time.perf_counter() - start_s, said


@contextlib.contextmanager
def started(command: Sequence[str], stdout: int = subprocess.DEVNULL,
            stderr: int = subprocess.DEVNULL) -> Iterator[subprocess.Popen[str]]:
    """Start `command` in the repository's root, and end it with all that it has started."""
    program = subprocess.Popen(command, cwd=ROOT, env=_environment(), text=True, start_new_session=True, stdout=stdout,
                               stderr=stderr)
    try:
        yield program
    finally:
        _end(program)


def _environment() -> dict[str, str]:
    """This environment, with gloo on the loopback interface: else it resolves the host's name, which can fail."""
    loopback = next((name for _, name in socket.if_nameindex() if name.startswith("lo")), None)
    return {**({"GLOO_SOCKET_IFNAME": loopback} if loopback else {}), **os.environ}


def _end(program: subprocess.Popen[str]) -> None:
    """End what is left of a program that has a session, and so a process group, of its own."""
    if program.poll() is None:  # torchrun puts its ranks into other groups, and ends them when it is told to end
        program.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            program.wait(LEAVE_LIMIT_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(program.pid, signal.SIGKILL)
    program.wait()
