"""L2: the launcher's side of the rank processes: start them, listen to them, ask them, end them."""
from __future__ import annotations

import bisect
import importlib.util
import itertools
import multiprocessing
import os
import pickle
import selectors
import signal
import sys
import threading
import time
import types
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from typing import Any

from book.launch import child, family, transfer
from book.launch.board import Board, Call
from book.launch.imports import LATER, USED
from book.launch.report import Report
from book.launch.transfer import Packed, SharedFile

# How much of a rank's output is kept, how much of one line, and how much of all ranks' output a cell shows: an endless
# loop of prints must fill up neither the notebook's memory nor the page.
MAX_KEPT_BYTES, MAX_LINE_BYTES, MAX_SHOWN_BYTES = 1 << 22, 1 << 18, 1 << 17
LISTEN_LIMIT_S = 0.2
DEAF_S = 1.0
_main_module_lock = threading.Lock()
_living: set[int] = set()  # the ranks of all launches of this process; under the lock


class Lines:
    """The lines that a rank wrote to one stream; after `MAX_KEPT_BYTES` further lines are counted, not kept.

    Of a line longer than `MAX_LINE_BYTES` only its head is kept.
    """

    def __init__(self) -> None:
        self.kept: list[str] = []
        self._num_bytes = self._num_dropped = self._num_cut = 0
        self._partial = bytearray()

    def feed(self, data: bytes) -> list[str]:
        """Add bytes that were read, b"" at the end of the stream; returns the lines that are now complete."""
        *whole, rest = data.split(b"\n")
        lines = [self._end(part) for part in whole]
        self._extend(rest)
        if not data and self._partial:
            lines.append(self._end(b""))
        for line in lines:
            self._keep(line)
        return lines

    def _extend(self, part: bytes) -> None:
        room = MAX_LINE_BYTES - len(self._partial)
        self._partial += part[:room]
        self._num_cut += max(0, len(part) - room)

    def _end(self, part: bytes) -> str:
        self._extend(part)
        line = self._partial.decode("utf-8", "replace")
        line += f" ... and {self._num_cut} more bytes in this line" if self._num_cut else ""
        self._partial, self._num_cut = bytearray(), 0
        return line

    def _keep(self, line: str) -> None:
        self._num_bytes += len(line) + 1
        if self._num_bytes <= MAX_KEPT_BYTES:
            self.kept.append(line)
        else:
            self._num_dropped += 1

    def shown(self) -> list[str]:
        """The lines to show; if some were dropped, a last line says how many."""
        return self.kept + ([f"... and more: {self._num_dropped} lines not kept"] if self._num_dropped else [])

    def head(self, limit: int) -> tuple[list[str], int]:
        """The first lines to show that fit into `limit` characters together, and the number of the others.

        A first line that does not fit is cut, and counts as one of the others.
        """
        lines = self.shown()
        ends = list(itertools.accumulate(len(line) + 1 for line in lines))
        num = bisect.bisect_right(ends, limit)
        cut = [f"{lines[0][:limit]} ..."] if lines and not num else []
        return lines[:num] + cut, len(lines) - num


@dataclass
class RankProcess:
    """One rank process and everything known about it."""
    rank: int
    process: Any = None
    control: Connection | None = None
    entered: bool = False
    returned: bool = False
    results: SharedFile | None = None
    result: Packed | None = None
    failure: child.Failure | None = None
    exit_code: int | None = None
    still_s: float | None = 0.0  # None: asked, but not answered yet
    stopped_s: float | None = None  # since when a signal has kept it from answering
    report: Report | None = None
    doing: str = ""  # in words, when all were asked
    recorded: Any = None
    output: Lines = field(default_factory=Lines)
    errors: Lines = field(default_factory=Lines)

    @property
    def finished(self) -> bool:
        """Whether the rank's function has returned and its result is here."""
        return self.result is not None

    @property
    def failed(self) -> bool:
        """Whether the rank raised, or died before its function returned."""
        return self.failure is not None or (self.exit_code is not None and not self.finished)

    @property
    def working(self) -> bool:
        """Whether the rank is still expected to do something."""
        return not self.finished and not self.failed

    def note_stop(self, now_s: float) -> None:
        """Note since when a signal has stopped this rank, if it has not answered: it then stands still."""
        if self.still_s is not None and self.stopped_s is None:
            return
        if family.is_stopped(self.process.pid):
            self.stopped_s = self.stopped_s or now_s
            self.still_s = now_s - self.stopped_s
        else:
            self.stopped_s = self.still_s = None

    def recording(self) -> Any:
        """This rank's recording when it returned, failed or was last asked; None if there is none."""
        if self.result is not None:
            return self.unpacked()[1]
        return self.recorded if self.recorded is not None else getattr(self.report, "recorded", None)

    def unpacked(self) -> tuple[Any, Any]:
        """The result and the recording of a finished rank; raises what unpickling raises."""
        assert self.result is not None and self.results is not None
        return transfer.unpacked(self.result, self.results)


@contextmanager
def without_main_module() -> Iterator[None]:
    """Hide the launching script while a process starts."""
    # multiprocessing would import the launching script in every rank. cloudpickle makes that unnecessary.
    with _main_module_lock:
        main = sys.modules["__main__"]
        sys.modules["__main__"] = types.ModuleType("__main__")
        try:
            yield
        finally:
            sys.modules["__main__"] = main


def _context() -> Any:
    return multiprocessing.get_context("forkserver")


def warm_up() -> None:
    """Start the process that ranks are forked from, if it is not running yet, without waiting for it."""
    _context().set_forkserver_preload(["book.launch.preload"])
    with without_main_module():
        os.environ[USED] = " ".join(name for name in LATER if name in sys.modules)
        try:
            forkserver.ensure_running()
        finally:
            del os.environ[USED]


def warm_up_in_kernel() -> None:
    """In a notebook's kernel, begin to load torch for the ranks, so that the first launch need not wait for it."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    can_launch = importlib.util.find_spec("torch") and "forkserver" in multiprocessing.get_all_start_methods()
    if getattr(shell, "kernel", None) is not None and can_launch:
        with suppress(OSError):  # the first launch says what is wrong
            warm_up()


def _leave_fork_server_to_parent() -> None:
    """In a forked process: start its own fork server at the next launch. Only its parent can wait for the old one."""
    forkserver._forkserver._forkserver_pid = None  # type: ignore[attr-defined]


os.register_at_fork(after_in_child=_leave_fork_server_to_parent)


class Ranks:
    """The rank processes of one launch; a context that leaves no process behind."""

    def __init__(self, world_size: int, on_line: Callable[[int, str], None] | None, check_calls: bool = True) -> None:
        self._all = [RankProcess(rank) for rank in range(world_size)]
        self._on_line = on_line
        self._board = Board(world_size) if check_calls else None
        self._selector = selectors.DefaultSelector()
        self._looked_s = self._changed_s = time.monotonic()

    def __iter__(self) -> Iterator[RankProcess]:
        return iter(self._all)

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: Any) -> None:
        self._kill()
        self._on_line = None  # an interrupted launch must not call back anymore
        self.listen(0.0)
        for key in list(self._selector.get_map().values()):
            self._drop(key)
        self._selector.close()
        if self._board is not None:
            self._board.close()
        for member in self._all:
            for end in (member.control, member.results):
                if end is not None:
                    end.close()
            # A user may keep the error, and with it this object. Close all system resources now.
            if member.process is not None and (member.process.pid is None or member.process.exitcode is not None):
                member.process.close()

    def start(self, job: bytes, called: SharedFile) -> None:
        """Fork a process per rank that runs `job` (see `child.main`)."""
        for member in self._all:
            member.results = SharedFile()
            member.control, theirs = multiprocessing.Pipe()
            output, output_end = multiprocessing.Pipe(duplex=False)
            errors, errors_end = multiprocessing.Pipe(duplex=False)
            ends = (theirs, output_end, errors_end)
            self._watch(member.control, self._hear, member)
            self._watch(output, self._read, member.output, member)
            self._watch(errors, self._read, member.errors, None)
            given = (self._board, called, member.results, job)
            member.process = _context().Process(target=child.main, args=(member.rank, *ends, *given))
            try:
                with without_main_module():
                    member.process.start()
                    _living.add(member.process.pid)
            finally:
                for end in ends:
                    end.close()
            self._selector.register(member.process.sentinel, selectors.EVENT_READ, (self._bury, (member,)))

    def _watch(self, connection: Connection, heard: Callable[..., None], *args: Any) -> None:
        self._selector.register(connection, selectors.EVENT_READ, (heard, args))

    def listen(self, wait_s: float) -> None:
        """Handle all messages and output of the ranks; waits at most `wait_s` for the first."""
        end_s = time.monotonic() + wait_s + LISTEN_LIMIT_S
        while (ready := self._selector.select(wait_s)) and time.monotonic() < end_s:
            wait_s = 0.0
            # Handle a rank's exit last, after its remaining messages.
            for key, _ in sorted(ready, key=lambda item: item[0].data[0] == self._bury):
                heard, args = key.data
                heard(key, *args)

    def ask(self, question: str, asked: Iterable[RankProcess] | None = None) -> None:
        """Send a question ("look", "report", "leave") to every live rank, or to those `asked`."""
        for member in self._all if asked is None else asked:
            if member.exit_code is None and member.control is not None:
                try:
                    member.control.send(question)
                except OSError:
                    continue

    def look(self) -> None:
        """Ask the ranks how long they have stood still, unless one has not answered the last question.

        A rank whose C code holds the GIL cannot answer, and more questions would fill its pipe. Neither can one that a
        signal has stopped, but that one stands still.
        """
        now_s = time.monotonic()
        working = [member for member in self._all if member.working]
        for member in working:
            member.note_stop(now_s)
        if all(member.still_s is not None for member in working):
            asked = [member for member in self._all if member.stopped_s is None]
            for member in asked:
                member.still_s = None
            self._looked_s = now_s
            self.ask("look", asked)

    def deaf(self) -> list[RankProcess]:
        """The working ranks that have not answered the last question for a while."""
        late = time.monotonic() - self._looked_s > DEAF_S
        return [member for member in self._all if member.working and late and member.still_s is None]

    def stand_still(self, limit_s: float) -> bool:
        """Whether every working rank has stood still for `limit_s`, and none has returned or died in that time.

        A rank that returns may have released another rank that has not woken up yet.
        """
        calm = self._looked_s - self._changed_s >= limit_s
        return calm and all((member.still_s or 0.0) >= limit_s for member in self._all if member.working)

    def _hear(self, key: selectors.SelectorKey, member: RankProcess) -> None:
        assert member.control is not None  # the message came through it
        try:
            kind, *content = pickle.loads(member.control.recv_bytes())
        except (EOFError, OSError):
            self._selector.unregister(key.fileobj)
            return
        if kind == "entered":
            member.entered = True
        elif kind == "returned":
            member.returned = True
        elif kind == "looked":
            member.still_s, = content
            member.stopped_s = None
        elif kind == "reported":
            member.report, = content
        elif kind == "done":
            member.result, = content
        elif kind == "failed":
            member.failure, member.recorded = content
        if kind in ("done", "failed"):
            self._changed_s = time.monotonic()

    def _read(self, key: selectors.SelectorKey, lines: Lines, speaker: RankProcess | None) -> None:
        data = os.read(key.fd, 1 << 16)
        if not data:
            self._drop(key)
        for line in lines.feed(data):
            if speaker is not None and self._on_line is not None:
                self._on_line(speaker.rank, line)

    def _drop(self, key: selectors.SelectorKey) -> None:
        self._selector.unregister(key.fileobj)
        if isinstance(key.fileobj, Connection):
            key.fileobj.close()

    def _bury(self, key: selectors.SelectorKey, member: RankProcess) -> None:
        self._selector.unregister(key.fileobj)
        member.process.join()
        member.exit_code = member.process.exitcode
        family.end_group(member.process.pid)  # immediately: the kernel may reuse the process id
        self._changed_s = time.monotonic()

    def last_calls(self) -> dict[str, dict[int, Call]]:
        """The last collective that each rank has called in each group; {} if the ranks do not compare their calls."""
        return self._board.last_calls() if self._board is not None else {}

    def dismiss(self, limit_s: float) -> None:
        """Let finished ranks exit, and read the rest of their output."""
        self.ask("leave")
        end_s = time.monotonic() + limit_s
        while any(member.exit_code is None for member in self._all) and time.monotonic() < end_s:
            self.listen(0.05)
        self.listen(0.0)

    def dump(self, wait_s: float) -> dict[int, str]:
        """Stacks, written by `faulthandler`, of the ranks that have not reported: those whose C code holds the GIL."""
        # Before a rank has entered its function, its signal handler may be missing: the signal would kill it.
        silent = [member for member in self._all if member.working and member.entered and member.report is None]
        before = {member.rank: len(member.errors.kept) for member in silent}
        for member in silent:
            with suppress(ProcessLookupError):
                os.kill(member.process.pid, signal.SIGUSR1)
        end_s = time.monotonic() + wait_s
        while silent and time.monotonic() < end_s:
            self.listen(0.05)
        stacks = {}
        for member in silent:
            stacks[member.rank] = "\n".join(member.errors.kept[before[member.rank]:])
            del member.errors.kept[before[member.rank]:]
            member.report = None  # the signal may have ended its call into C: what it says now is too late
        return stacks

    def _kill(self) -> None:
        """Kill every live rank and all processes that it has started."""
        living = [member for member in self._all if getattr(member.process, "pid", None) and member.exit_code is None]
        if living:
            family.end([member.process.pid for member in living])
        for member in living:
            member.process.join(5)
        _end_orphans([member.process.pid for member in self._all if getattr(member.process, "pid", None)])


def _end_orphans(ended: Iterable[int]) -> None:
    """Kill what ranks that have ended have left: the server that they were forked from has adopted it."""
    with _main_module_lock:  # no rank is being started whose id is not known yet
        _living.difference_update(ended)
        server = forkserver._forkserver._forkserver_pid  # type: ignore[attr-defined]
        if server is not None:
            family.end_children(server, kept=_living)
