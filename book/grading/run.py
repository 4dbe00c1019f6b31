"""L4: one job: a notebook run by plain nbval, with its kernel in a sandbox and watched from outside."""
from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TextIO

import nbformat
import psutil
from nbformat import NotebookNode

from book.grading import kernel, sandbox
from book.grading.listening import ALL, LAUNCHES, SOME
from book.grading.nbval_plugin import RESULT
from book.grading.sandbox import Limits
from book.grading.warm import ForkedJob, Warm
from book.launch.imports import may_need_later

# The ranks' device differs between machines; `launch` prints it on a line of its own.
SANITIZE = "[launch]\nregex: \\d+ ranks? on \\w+ \\([^\\n]*\nreplace: RANKS\n"
PYTEST = "from book.extras import without_iri_grammar as f; f(); import pytest; raise SystemExit(pytest.main())"
MOST_LINES = 16  # of an error that a student is shown
COLOUR = re.compile(r"\x1b\[[0-9;]*m")
POLL_S = 0.2
POLLS_PER_SAMPLE = 5  # of all processes' memory: dividing shared pages takes milliseconds for each process
MAX_LOG_BYTES = 32 << 20
NBVAL_BYTES = 8 << 30  # of address space: endless output uses up nbval's memory, not ours
MAX_NBVAL_BYTES = 2 << 30  # nbval keeps everything that a submission outputs
LONGEST_TMPDIR = 70  # multiprocessing's sockets add 32 bytes, and a socket's path has room for about 100
KERNEL_GONE_S, RESULT_GONE_S = 8, 60  # how long nbval may take to notice, and to report


@dataclass
class Result:
    """How a job ended: a verdict for each cell that was run, and `why` it was stopped, if it was.

    `peak_bytes` is the most memory that all its processes held together, `largest_bytes` the most that one of them
    held.
    """
    cells: list[dict[str, Any]] = field(default_factory=list)
    why: str | None = None
    wall_s: float = 0.0
    peak_bytes: int = 0
    largest_bytes: int = 0
    log: str = ""

    def passed(self) -> set[str]:
        """The ids of the checks that passed."""
        return {cell["id"] for cell in self.cells if cell["kind"] == "check" and cell["ok"]} if not self.why else set()

    def first_failure(self) -> str | None:
        """What the first cell that failed said: the last lines of a traceback, else all of it; None if checks passed.

        A check and a launch show no traceback, and a launch says first why its ranks wait, then where each one is.
        """
        if self.why:
            return self.why
        failed = next((cell for cell in self.cells if not cell["ok"]), None)
        if failed is None or all(cell["ok"] for cell in self.cells if cell["kind"] == "check"):
            return None
        told = COLOUR.sub("", failed["traceback"]).strip() or COLOUR.sub("", failed["message"]).strip()
        lines = [line for line in told.splitlines() if line.strip()]
        if len(lines) > 6 and any("Traceback (most recent call last)" in line for line in lines[:2]):
            lines = lines[-3:]
        shown = [*lines[:MOST_LINES], *["..."] * (len(lines) > MOST_LINES)]
        return f"{failed['id']}: " + "\n    ".join(shown)


def run(notebook: NotebookNode, limits: Limits = Limits(), sandboxed: bool = True, withheld: Iterable[Path] = (),
        prefix: str = "lockstep-", warm: Warm | None = None) -> Result:
    """Runs a job's notebook under nbval and compares the outputs of its checks with those stored in it.

    The job has its own folder in the system's temporary folder; it is removed afterwards, and all its processes are
    ended. Processes that are `warm` are forked, others started. Raises SandboxError if no sandbox is available.
    """
    folder = Path(tempfile.mkdtemp(prefix=prefix))
    try:
        nbformat.write(notebook, folder / "job.ipynb")
        (folder / "sanitize.cfg").write_text(SANITIZE)
        kernel.write_specs(folder / "jupyter")
        if warm is not None:
            return _WarmJob(folder, limits, warm, withheld).run()
        sandbox.folder_for(folder, withheld)
        return _Job(folder, limits, sandboxed, loaded_at_start(notebook)).run()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def loaded_at_start(notebook: NotebookNode) -> str:
    """How much of torch a notebook's kernel should have from its start: ALL, SOME or, if it launches no ranks, ""."""
    code = "\n".join(cell.source for cell in notebook.cells if cell.cell_type == "code")
    if "book.launch" not in code:
        return ""
    return ALL if may_need_later(code) else SOME


class _Job:
    """nbval's process, what it started, and whether they stay within the limits."""

    def __init__(self, folder: Path, limits: Limits, sandboxed: bool, loaded: str) -> None:
        self.folder, self.limits, self.sandboxed, self.loaded = folder, limits, sandboxed, loaded
        self.result_file, self.log_file = folder / "result.json", folder / "log"
        self.started = time.monotonic()
        self.seen, self.num_polls, self.peak_bytes, self.largest_bytes = False, 0, 0, 0
        self.gone_since: float | None = None

    def run(self) -> Result:
        with open(self.log_file, "w") as log:
            self._start(log)
            try:
                why = self._watch()
            finally:
                self.largest_bytes = max(self.largest_bytes, self._end())
        result = Result(why=why, wall_s=time.monotonic() - self.started, peak_bytes=self.peak_bytes,
                        largest_bytes=self.largest_bytes, log=_head(self.log_file))
        return result if why else self._read(result)

    def _start(self, log: TextIO) -> None:
        # nbval dies with the grader, and the sandbox with nbval.
        limited = [*sandbox.dying_with_us(), sandbox.tool("prlimit"), f"--as={NBVAL_BYTES}", "--"]
        pytest = [sys.executable, "-c", PYTEST, *self._arguments()]
        self.process = subprocess.Popen([*limited, *pytest] if self.sandboxed else pytest, cwd=self.folder,
                                        env=self._environment(), stdout=log, stderr=log, stdin=subprocess.DEVNULL,
                                        start_new_session=True)
        self.pid = self.process.pid

    def _has_ended(self) -> bool:
        """Whether nbval has."""
        # The process is not reaped here: `_end` asks the system what it and its descendants have used.
        return bool(os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT))

    def _processes(self) -> list[psutil.Process]:
        """What runs for the job, nbval itself excepted."""
        return descendants(self.pid)

    def _end(self) -> int:
        """Ends all processes; returns the most memory that one of them has held, in bytes, as far as is known."""
        return _end_measured(self.process)

    def _arguments(self) -> list[str]:
        folder = str(self.folder)
        return ["-p", "no:cacheprovider", "-p", "book.grading.nbval_plugin",
                "-p", "nbval.plugin", "--rootdir", folder, "-c", "/dev/null", "--confcutdir", folder,
                "--color=no", "-q",
                "--nbval", "--nbval-kernel-name", kernel.SANDBOXED if self.sandboxed else kernel.PLAIN,
                "--nbval-sanitize-with", "sanitize.cfg", "--nbval-cell-timeout", str(self.limits.cell_s),
                "--nbval-kernel-startup-timeout", "60", "job.ipynb"]

    def _environment(self) -> dict[str, str]:
        added = {"JUPYTER_PATH": str(self.folder / "jupyter"), RESULT: str(self.result_file),
                 "JUPYTER_PREFER_ENV_PATH": "0", "PYTHONDONTWRITEBYTECODE": "1", "PYTHONSAFEPATH": "1",
                 "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
        if not self.sandboxed:
            # Temporary files go into the job's folder, and are removed with it, unless its path is too long for the
            # ranks' sockets.
            roomy = len(os.fsencode(self.folder)) <= LONGEST_TMPDIR
            return {**os.environ, **added, **({"TMPDIR": str(self.folder)} if roomy else {})}
        kept = {name: os.environ[name] for name in ("PATH", "LANG", "TMPDIR") if name in os.environ}
        private = {"HOME": "/nonexistent", "PYTHONNOUSERSITE": "1", "JUPYTER_RUNTIME_DIR": str(self.folder),
                   "IPYTHONDIR": str(self.folder)}
        run = {kernel.RUN: str(self.folder), kernel.LIMITS: json.dumps(asdict(self.limits))}
        return {**kept, **added, **private, **run, **({LAUNCHES: self.loaded} if self.loaded else {})}

    def _watch(self) -> str | None:
        """Waits for nbval to end; returns the limit that was exceeded, if any."""
        while not self._has_ended():
            why = self._exceeded()
            if why:
                return why
            time.sleep(POLL_S)
        return None

    def _exceeded(self) -> str | None:
        children = self._processes()
        self.largest_bytes = max([self.largest_bytes, *map(peak_of, children)])
        if time.monotonic() - self.started > self.limits.wall_s:
            return "time limit"
        if self.num_polls % POLLS_PER_SAMPLE == 0:
            self.peak_bytes = max(self.peak_bytes, sum(map(memory_of, children)))
        self.num_polls += 1
        if hold_more_than(self.limits.memory_bytes, children):
            return "memory limit"
        if self.log_file.stat().st_size > MAX_LOG_BYTES or _resident(self.pid) > MAX_NBVAL_BYTES:
            return "output limit"
        return "the kernel died" if self._kernel_gone(children) else None

    def _kernel_gone(self, children: list[psutil.Process]) -> bool:
        """Whether nbval's kernel has been gone for longer than nbval needs to notice."""
        if children:
            self.seen, self.gone_since = True, None
        elif self.seen:
            self.gone_since = self.gone_since or time.monotonic()
        patience = RESULT_GONE_S if self.result_file.exists() else KERNEL_GONE_S
        return self.gone_since is not None and time.monotonic() - self.gone_since > patience

    def _read(self, result: Result) -> Result:
        try:
            result.cells = json.loads(self.result_file.read_text())["cells"]
        except (OSError, ValueError, KeyError):
            result.why = "nbval gave no result"
        if any(cell["stopped"] for cell in result.cells):
            result.why = "time limit of a cell, or the kernel died"
        return result


class _WarmJob(_Job):
    """A job whose nbval and whose kernel are forked from warm processes: neither is a descendant of the other."""

    def __init__(self, folder: Path, limits: Limits, warm: Warm, withheld: Iterable[Path]) -> None:
        super().__init__(folder, limits, sandboxed=True, loaded="")
        self.warm, self.withheld = warm, withheld

    def _start(self, log: TextIO) -> None:
        self.kernel: ForkedJob = self.warm.enclosed(self.withheld, self.limits)
        try:
            self.nbval = self.warm.nbval(self.folder, self._environment(), self._arguments(), NBVAL_BYTES, log.fileno(),
                                         self.kernel)
        except BaseException:
            self.kernel.end()
            raise
        self.pid, self.started = self.nbval.pid, time.monotonic()

    def _has_ended(self) -> bool:
        return self.nbval.is_over()

    def _processes(self) -> list[psutil.Process]:
        return in_sandbox(self.kernel)

    def _end(self) -> int:
        self.nbval.end()
        return self.kernel.end()


def end(process: subprocess.Popen[bytes]) -> None:
    """Kills a process and all its descendants. Processes in the sandbox die with the sandbox."""
    children = descendants(process.pid)
    process.kill()
    _kill(children)
    process.wait()
    psutil.wait_procs(children, timeout=10)


def _end_measured(process: subprocess.Popen[bytes]) -> int:
    """Like `end`, for a process that nobody has waited for yet; it may have ended.

    Returns the largest peak memory, in bytes, of the process and those descendants that their parents waited for.
    """
    children = descendants(process.pid)
    os.kill(process.pid, signal.SIGKILL)
    _kill(children)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    psutil.wait_procs(children, timeout=10)
    return usage.ru_maxrss * 1024


def _kill(processes: Iterable[psutil.Process]) -> None:
    for process in processes:
        with suppress(psutil.Error):  # it has already ended
            process.kill()


def descendants(pid: int) -> list[psutil.Process]:
    """The processes that a process has started, directly or indirectly."""
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.Error:
        return []


def in_sandbox(job: ForkedJob) -> list[psutil.Process]:
    """The processes of a job's sandbox."""
    try:
        first = psutil.Process(job.pid)
        return [first, *first.children(recursive=True)] if not job.is_over() else []
    except psutil.Error:
        return []


def hold_more_than(num_bytes: int, processes: Sequence[psutil.Process]) -> bool:
    """Whether processes together hold more memory than this, with shared pages counted once."""
    # Resident memory counts them once for each process: never too little, and much quicker to read.
    return sum(_resident(one.pid) for one in processes) > num_bytes < sum(map(memory_of, processes))


def memory_of(process: psutil.Process) -> int:
    """A process's memory in bytes, with shared pages divided among their users; its RSS if that can't be read."""
    try:
        with open(f"/proc/{process.pid}/smaps_rollup") as file:
            return next(int(line.split()[1]) * 1024 for line in file if line.startswith("Pss:"))
    except (OSError, StopIteration, ValueError):
        try:
            return process.memory_info().rss
        except psutil.Error:
            return 0


def peak_of(process: psutil.Process) -> int:
    """A process's peak memory in bytes, as the kernel counts it."""
    try:
        with open(f"/proc/{process.pid}/status") as file:
            return next(int(line.split()[1]) * 1024 for line in file if line.startswith("VmHWM:"))
    except (OSError, StopIteration, ValueError):
        return 0  # it has ended


def _resident(pid: int) -> int:
    """A process's resident memory in bytes."""
    try:
        return psutil.Process(pid).memory_info().rss
    except psutil.Error:
        return 0


def _head(path: Path) -> str:
    with open(path, errors="replace") as file:
        return file.read(4000)
