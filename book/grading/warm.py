"""L4: the warm processes of a grading run, seen from outside: what they fork, and how to end it.

A kernel imports torch for seconds, and an exercise of four ranks on a wire does so five times over. So one process for
nbval, and one for each set of withheld modules, import everything once; each job is forked from them, into a sandbox of
its own (see forking, enclosed).
"""
from __future__ import annotations

import itertools
import json
import os
import secrets
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from nbformat import NotebookNode

from book.grading import sandbox
from book.grading.forking import ENCLOSED, MAX_BYTES, NBVAL, OUR_MODULES, is_over
from book.grading.lab import code_cells, marks, points
from book.grading.sandbox import FIRST_UID, NUM_UIDS, SCRATCH, Limits, SandboxError
from book.grading.withheld_modules import imports, withheld_modules

START_S = 180  # for a warm process to import everything, on a busy machine
END_S = 10
CREDENTIALS = struct.Struct("3i")


@dataclass
class ForkedJob:
    """A forked process, the first one of its sandbox if it has one: its id here, and our end of its socket."""
    pid: int
    socket: socket.socket

    def tell(self, message: Mapping[str, Any], handles: Sequence[int] = ()) -> None:
        """Sends a message with handles; raises OSError if it has ended."""
        socket.send_fds(self.socket, [json.dumps(message).encode()], list(handles))

    def is_over(self) -> bool:
        """Whether it has ended: it has closed its socket, or what waits for it has said so."""
        return is_over(self.socket)

    def end(self) -> int:
        """Ends it, with its whole sandbox; returns the most memory that one process of it has held, 0 if unknown."""
        if not self.is_over():
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
        self.socket.settimeout(END_S)
        with self.socket, suppress(OSError, ValueError):
            return json.loads(self.socket.recv(MAX_BYTES) or b"{}").get("largest_bytes", 0)
        return 0


class _Process:
    """A warm process, and the socket over which it is asked to fork."""

    def __init__(self, kind: str, modules: Iterable[str], withheld: Iterable[Path] = (), prefix: str = "") -> None:
        self.folder = tempfile.TemporaryDirectory(prefix=prefix, ignore_cleanup_errors=True)
        self.channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.lock = threading.Lock()
        command = [sys.executable, "-m", "book.grading.forking", str(theirs.fileno()), kind, *modules]
        env = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1", "PYTHONSAFEPATH": "1", "PYTHONNOUSERSITE": "1",
               "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
        parent = Path(self.folder.name)
        if kind == ENCLOSED:
            sandbox.folder_for(parent, withheld)
            command, env = sandbox.command_of_warm(command, parent), {"PATH": "/usr/bin:/bin"}
        with theirs, open(parent / "log", "w") as log:
            self.process = subprocess.Popen(command, cwd="/", env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                                            pass_fds=[theirs.fileno()], start_new_session=True)

    def fork(self) -> socket.socket:
        """Our end of the socket of a newly forked child."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        with theirs, self.lock:
            socket.send_fds(self.channel, [b"1"], [theirs.fileno()])
        return ours

    def end(self) -> None:
        """Ends it, and all that it has forked."""
        self.channel.close()
        try:
            self.process.wait(END_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.folder.cleanup()

    def log(self) -> str:
        """The last words of a process that has failed."""
        text = Path(self.folder.name, "log").read_text(errors="replace").strip()
        return text.splitlines()[-1] if text else ""


class Warm:
    """The warm processes of a run of `lab`, each started when first needed; they end with `close`, or with us."""

    def __init__(self, lab: NotebookNode, prefix: str = "lockstep-") -> None:
        self.modules, self.prefix = modules_for(lab), prefix
        self.first = next((withheld_modules(lab, exercise) for exercise in points(lab)), [])
        self.processes: dict[tuple[Any, ...], _Process] = {}
        self.lock = threading.Lock()
        self.uids = itertools.count(secrets.randbelow(NUM_UIDS))

    def close(self) -> None:
        """Ends all of them, and what they have forked."""
        while self.processes:
            self.processes.popitem()[1].end()

    def works(self) -> bool:
        """Whether they can make sandboxes here: a system may forbid user namespaces inside of user namespaces."""
        if any(place.is_relative_to(folder) for place in [*sandbox.pythons(), sandbox.BOOK] for folder in SCRATCH):
            return False  # a sandbox's own folder would hide it
        self._process(NBVAL, ())  # it imports meanwhile
        try:  # in a process that the first exercise needs anyway: one costs seconds, and 500 MB
            self.enclosed(self.first, Limits()).end()
        except SandboxError:
            self.close()
            return False
        return True

    def enclosed(self, withheld: Iterable[Path], limits: Limits, alone: bool = False) -> ForkedJob:
        """A process in a new sandbox that waits for what it is to run. Raises SandboxError if there can be none."""
        modules = tuple(withheld)
        process = self._process(ENCLOSED, self.modules, modules)
        uid = FIRST_UID + next(self.uids) % NUM_UIDS if os.geteuid() == 0 else None
        return self._started(process, {"limits": asdict(limits), "uid": uid, "alone": alone})

    def nbval(self, folder: Path, env: Mapping[str, str], arguments: Sequence[str], max_bytes: int, log: int,
              kernel: ForkedJob) -> ForkedJob:
        """nbval in a process of its own, with the job's kernel."""
        told = {"folder": str(folder), "env": dict(env), "arguments": list(arguments), "bytes": max_bytes}
        return self._started(self._process(NBVAL, ()), told, [log, kernel.socket.fileno()])

    def _process(self, kind: str, modules: Sequence[str], withheld: tuple[Path, ...] = ()) -> _Process:
        with self.lock:
            known = self.processes.get((kind, withheld))
            if known is None or known.process.poll() is not None:
                known = self.processes[kind, withheld] = _Process(kind, modules, withheld, self.prefix)
            return known

    def _started(self, process: _Process, told: Mapping[str, Any], handles: Sequence[int] = ()) -> ForkedJob:
        job = ForkedJob(0, process.fork())
        job.socket.settimeout(START_S)
        try:
            job.tell(told, handles)
            data, ancillary, _, _ = job.socket.recvmsg(MAX_BYTES, socket.CMSG_SPACE(CREDENTIALS.size))
            said = json.loads(data or b"{}")
        except (OSError, ValueError) as error:
            said, ancillary = {"error": str(error)}, []
        ids = [CREDENTIALS.unpack(content)[0] for _, kind, content in ancillary if kind == socket.SCM_CREDENTIALS]
        if not said.get("ready") or not ids:
            job.socket.close()
            raise SandboxError(f"a process for a job did not start: {said.get('error') or process.log() or 'it ended'}")
        job.socket.settimeout(None)
        job.pid = ids[0]
        return job


def modules_for(lab: NotebookNode) -> list[str]:
    """What warm processes import for a lab: what its setup and its checks do, and what a kernel does.

    Where a check limits the memory of processes, nothing: what is imported counts in each of them.
    """
    cells = [cell for cell in code_cells(lab) if marks(cell).get("kind") in ("setup", "check")]
    if any("memory" in marks(cell) for cell in cells):
        return []
    return [*OUR_MODULES, *sorted(set().union(*(imports(cell.source) for cell in cells)))]
