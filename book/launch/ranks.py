"""L2: the launcher's side of the rank processes: start them, listen to them, ask them, end them."""
from __future__ import annotations

import multiprocessing
import os
import pickle
import selectors
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

from book.audit import Notes
from book.launch import child, family, transfer
from book.launch.agreement import last_calls
from book.launch.board import Board
from book.launch.output import StreamLines
from book.launch.report import Report
from book.launch.server import context, main_module_lock, new_interpreter, server_pid, without_main_module
from book.launch.transfer import Packed, SharedFile
from book.waiting.hang import CollectiveCall, Group

LISTEN_LIMIT_S = 0.2
DEAF_S = 1.0
_living: set[int] = set()  # the ranks of all launches of this process; under the lock


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
    recorded: Any = None
    notes: Notes | None = None
    output: StreamLines = field(default_factory=StreamLines)
    errors: StreamLines = field(default_factory=StreamLines)

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
        """Note when a signal stopped this rank, if it has not answered: from then on it makes no progress."""
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


class Ranks:
    """The rank processes of one launch; a context that leaves no process behind."""

    def __init__(self, world_size: int, on_line: Callable[[int, str], None] | None, check_calls: bool = True) -> None:
        self._all = [RankProcess(rank) for rank in range(world_size)]
        self._on_line = on_line
        self._board = Board(range(world_size)) if check_calls else None
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

    def start(self, job: bytes, called: SharedFile, hash_seeds: bool = False) -> None:
        """Fork a process per rank that runs `job` (see `child.main`); with `hash_seeds`, start each anew."""
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
            how = new_interpreter(child.FIRST_SEED + member.rank) if hash_seeds else nullcontext(context())
            try:
                with without_main_module(), how as starts:
                    member.process = starts.Process(target=child.main, args=(member.rank, *ends, *given))
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

    def ask(self, question: child.Asked, asked: Iterable[RankProcess] | None = None) -> None:
        """Send a question to every live rank, or to those `asked`."""
        for member in self._all if asked is None else asked:
            if member.exit_code is None and member.control is not None:
                try:
                    member.control.send(question)
                except OSError:
                    continue

    def look(self) -> None:
        """Ask the ranks how long they have stood still, unless one has not answered the last question.

        A rank whose C code holds the GIL cannot answer, and more questions would fill its pipe. A rank that a signal
        has stopped cannot answer either, but it is known to stand still.
        """
        now_s = time.monotonic()
        working = [member for member in self._all if member.working]
        for member in working:
            member.note_stop(now_s)
        if all(member.still_s is not None for member in working):
            asked = [member for member in working if member.stopped_s is None]
            for member in asked:
                member.still_s = None
            self._looked_s = now_s
            self.ask(child.Asked.LOOK, asked)

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
            told = pickle.loads(member.control.recv_bytes())
        except (EOFError, OSError):
            self._selector.unregister(key.fileobj)
            return
        vars(member).update(told)
        if not told.keys().isdisjoint(("result", "failure")):
            self._changed_s = time.monotonic()

    def _read(self, key: selectors.SelectorKey, lines: StreamLines, speaker: RankProcess | None) -> None:
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

    def last_calls(self) -> dict[Group, dict[int, CollectiveCall]]:
        """The last collective that each rank has called in each group; {} if the ranks do not compare their calls."""
        return last_calls(self._board) if self._board is not None else {}

    def dismiss(self, limit_s: float) -> None:
        """Let finished ranks exit, and read the rest of their output."""
        self.ask(child.Asked.LEAVE)
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
    """Kill the processes that ended ranks have left behind: the server that forked the ranks has adopted them."""
    with main_module_lock:  # no rank is being started whose id is not known yet
        _living.difference_update(ended)
        server = server_pid()
        if server is not None:
            family.end_children(server, kept=_living)
