"""L4: ranks on a wire: each in its own sandbox, with one socket; they serve one exercise after another.

Forked from a warm process a rank costs little: then each serves one exercise, and knows nothing of those before.
"""
from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from book.grading import sandbox
from book.grading.forking import RANK
from book.grading.run import descendants, end, hold_more_than, in_sandbox
from book.grading.sandbox import Limits
from book.grading.warm import ForkedJob, Warm
from book.wire.broker import WireTimeout

START_S, NEXT_S = 120, 10  # how long a rank may take to start, and to be ready for the next exercise
WATCH_S = 0.5
OF_A_RANK = Limits(memory_bytes=2 << 30, num_processes=64)  # per process; their total is limited too


class WireMemory(WireTimeout):
    """The ranks' processes together use more memory than a job is allowed."""


@dataclass
class _Rank:
    """A rank's process, and the socket that it connects to for each exercise: its own, which shows who connects."""
    process: subprocess.Popen[bytes]
    listener: socket.socket
    folder: tempfile.TemporaryDirectory[str]

    def accept(self, limit_s: int) -> socket.socket | None:
        """The rank's next connection; None if there is none within `limit_s` seconds."""
        self.listener.settimeout(1)
        for _ in range(limit_s):
            try:
                return self.listener.accept()[0]
            except TimeoutError:
                if self.process.poll() is not None:
                    break
        return None

    def processes(self) -> list[psutil.Process]:
        """All that runs for it."""
        return descendants(self.process.pid)

    def kill(self) -> None:
        """Ends the process and those forked from it."""
        end(self.process)

    def end(self) -> None:
        """Ends the process and those forked from it, and removes its folder."""
        self.kill()
        self.listener.close()
        self.folder.cleanup()


@dataclass
class _ForkedRank:
    """A rank that is forked from a warm process, for one exercise."""
    job: ForkedJob

    def processes(self) -> list[psutil.Process]:
        """All that runs for it."""
        return in_sandbox(self.job)

    def kill(self) -> None:
        """Ends its sandbox."""
        with suppress(ProcessLookupError):
            os.kill(self.job.pid, signal.SIGKILL)

    def end(self) -> None:
        """Ends its sandbox, and closes our end of its socket."""
        self.job.end()


class WireRanks:
    """The ranks for one submission's exercises, started when first needed and ended with the context.

    Importing torch and running a lab's setup is most of a rank's work. So each rank does that once, and then forks a
    process for each exercise.
    """

    def __init__(self, sandboxed: bool = True, prefix: str = "lockstep-", warm: Warm | None = None) -> None:
        self.sandboxed, self.prefix, self.warm = sandboxed, prefix, warm
        self.ranks: list[_Rank] = []
        self.forked: list[_ForkedRank] = []
        self.made_for: tuple[Any, ...] = ()
        self.over, self.too_large = threading.Event(), False
        self.watcher = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> WireRanks:
        return self

    def __exit__(self, *error: object) -> None:
        self.over.set()
        if self.watcher.is_alive():
            self.watcher.join()
        self.end()

    def end(self) -> None:
        """Ends all ranks; new ones are started when needed."""
        while self.ranks:
            self.ranks.pop().end()
        while self.forked:
            self.forked.pop().end()

    def connect(self, world_size: int, head: Sequence[str], withheld: Sequence[Path]) -> list[socket.socket]:
        """Connections to ranks that have run the sources in `head`, with the `withheld` modules of the book disabled.

        Raises WireTimeout if one does not start.
        """
        self.too_large = False
        if self.warm is not None:
            return self._forked(self.warm, world_size, head, withheld)
        if self.made_for != (made_for := (tuple(head), tuple(withheld))):
            self.end()
            self.made_for = made_for
        connections = [rank.accept(NEXT_S) for rank in self.ranks[:world_size]]
        if None in connections:  # an earlier exercise still keeps a rank busy
            self.end()
            connections = []
        new = [self._start() for _ in range(world_size - len(self.ranks))]
        connections += [rank.accept(START_S) for rank in new]
        made = [connection for connection in connections if connection is not None]
        if len(made) < len(connections):
            self.end()
            raise WireTimeout("a rank did not start")
        return made

    def check(self) -> None:
        """Raises WireMemory if the last ranks that connected were ended because they used too much memory."""
        if self.too_large:
            raise WireMemory("the ranks use too much memory")

    def _watch(self) -> None:
        """Ends ranks that use too much memory: the sandbox limits each process, but a process can start others."""
        while not self.over.wait(WATCH_S):
            ranks: list[_Rank | _ForkedRank] = [*self.ranks, *self.forked]
            processes = [process for rank in ranks for process in rank.processes()]
            if hold_more_than(Limits().memory_bytes, processes):
                self.too_large = True
                for rank in ranks:
                    rank.kill()

    def _forked(self, warm: Warm, world_size: int, head: Sequence[str],
                withheld: Sequence[Path]) -> list[socket.socket]:
        self.end()
        connections = []
        for _ in range(world_size):
            job = warm.enclosed(withheld, OF_A_RANK, alone=True)
            self.forked.append(_ForkedRank(job))
            ours, theirs = socket.socketpair()
            connections.append(ours)
            with theirs:
                job.tell({"what": RANK, "head": list(head)}, [theirs.fileno()])
        self._begin_to_watch()
        return connections

    def _begin_to_watch(self) -> None:
        if self.watcher.ident is None:
            self.watcher.start()

    def _start(self) -> _Rank:
        head, withheld = self.made_for
        folder = tempfile.TemporaryDirectory(prefix=self.prefix, ignore_cleanup_errors=True)
        parent = Path(folder.name)
        path = sandbox.folder_for(parent, withheld, alone=True) / "w"
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(str(path))
        path.chmod(0o777)
        listener.listen(1)
        (parent / "head.json").write_text(json.dumps(head))
        command = [sys.executable, "-m", "book.wire", str(path)]
        if self.sandboxed:
            command = [*sandbox.dying_with_us(), *sandbox.command(command, parent, OF_A_RANK)]
        with open(parent / "head.json") as sources:
            process = subprocess.Popen(command, stdin=sources, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                                       start_new_session=True)
        self.ranks.append(_Rank(process, listener, folder))
        self._begin_to_watch()
        return self.ranks[-1]
