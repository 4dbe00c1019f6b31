"""Programs that end at a time limit, with every process that they started."""
from __future__ import annotations

import contextlib
import itertools
import os
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.process import ROOT

NAME, ALL = "LOCKSTEP_BOUNDED", uuid.uuid4().hex  # each program has ALL and a number of its own in its environment
GONE_LIMIT_S = 10.0  # a process that sleeps in a GPU's driver cannot be killed: it is left behind and reported

_numbers = itertools.count()


@dataclass(frozen=True)
class Ended:
    """How a program ended: exit status (None: at the limit), output, and how many processes could not be killed."""

    status: int | None
    output: str
    seconds: float
    num_left: int = 0

    def tail(self, num_lines: int = 8) -> list[str]:
        """The last lines of its output that are not empty."""
        return [line for line in self.output.splitlines() if line.strip()][-num_lines:]


def run_bounded(module: str, arguments: Sequence[str], limit_s: float) -> Ended:
    """Run a module of Python in the repository's root, for at most `limit_s`; nothing that it starts outlives it."""
    mark = f"{ALL}.{next(_numbers)}."
    start_s = time.perf_counter()
    with tempfile.TemporaryFile() as output:  # a pipe would stay open for as long as any process has it
        program = subprocess.Popen([sys.executable, "-m", module, *arguments], cwd=ROOT, start_new_session=True,
                                   env={**os.environ, NAME: mark}, stdin=subprocess.DEVNULL, stdout=output,
                                   stderr=subprocess.STDOUT)
        status = None
        try:
            status = program.wait(limit_s)
        except subprocess.TimeoutExpired:
            pass
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(program.pid, signal.SIGKILL)  # without /proc this is all that can be done
            num_left = end_all(mark)
            with contextlib.suppress(subprocess.TimeoutExpired):
                program.wait(1.0)
        output.seek(0)
        text = output.read().decode(errors="replace")
    return Ended(status, text, time.perf_counter() - start_s, num_left)


def end_all(mark: str = ALL) -> int:
    """Kill processes with a mark in their environment, or all that were started here; returns how many remain."""
    end_s = time.monotonic() + GONE_LIMIT_S
    while (left := marked(mark)) and time.monotonic() < end_s:
        for pid in left:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)
    return len(left)


def marked(mark: str) -> list[int]:
    """The processes that were started with a mark that begins with `mark`.

    Kernels, ranks and torchrun's workers are in sessions of their own, and some have lost their parents, but they all
    inherit the environment. Without /proc (macOS) none can be found.
    """
    found, entry = [], f"{NAME}={mark}".encode()
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if any(part.startswith(entry) for part in path.read_bytes().split(b"\0")):
                found.append(int(path.parent.name))
        except OSError:  # it has ended, or is another user's
            continue
    return found
