"""L2: the thread of a rank that reports what the rank does, and what is noted of its calls."""
from __future__ import annotations

import faulthandler
import functools
import os
import threading
import time
import traceback
from contextlib import suppress
from io import FileIO
from pathlib import Path
from types import CodeType
from typing import Any

from book import audit, tap
from book.audit import Notes
from book.job import told
from book.job.compared import Compared, Exchanged, wrong_start
from book.job.noted import mapped, note
from book.job.told import Mismatch, Told
from book.launch import children, files, history, where
from book.launch.agreement import last_calls
from book.launch.board import Board
from book.launch.child import Failure
from book.launch.peers import Peers
from book.launch.report import Stillness, report, take_notes
from book.tap import Op, Subscriber
from book.waiting.doing import Doing, Kind
from book.waiting.hang import Group, Standing

# After so long without a report, a rank's stacks are written without the interpreter lock. That is safe where C code
# holds the lock, and may crash a process that runs Python: so not while torch is imported, before this thread reports.
SILENT_S = 3.0
LOOK_S = 0.5


class Totals(Subscriber):
    """How often this process has called what in each group, and the bytes of its tensors."""

    def __init__(self) -> None:
        self._of: dict[tuple[Any, str], list[int]] = {}

    def before(self, op: Op) -> None:
        self._add(op, 1)

    def withdrawn(self, op: Op) -> None:
        self._add(op, -1)

    def _add(self, op: Op, times: int) -> None:
        if not op.inside:
            total = self._of.setdefault((op.group, op.function or op.kind), [0, 0])
            total[0] += times
            total[1] += times * op.num_bytes

    def told(self) -> dict[tuple[Group, str], tuple[int, int]]:
        """The sums so far."""
        return {(group.shared, name): (calls, size)
                for (group, name), (calls, size) in list(self._of.items()) if calls > 0}


class Watch:
    """What watches this rank from its first init_process_group to the end of its script, which `running` runs."""

    def __init__(self, folder: Path, first: Told, stacks: FileIO, running: CodeType) -> None:
        self._folder, self._told, self._stacks = folder, first._replace(entered=True), stacks
        self._stillness, self._over, self._writes = Stillness(), threading.Event(), threading.Lock()
        self._board = Board.at(folder / told.BOARD, first.host_ranks)
        self._totals, self._compared = Totals(), Compared(self._board, self._tell_at_once)
        exchanged = Exchanged(self._board.mail, first.world_size, self._compared)
        audit.start(is_received=exchanged.is_received)
        self._noted = note(mapped(told.ring_file(folder, first.rank)))
        compared: tuple[Subscriber, ...] = (self._compared, exchanged)
        tap.subscribe(Peers())
        take_notes()
        for subscriber in (self._totals, *compared):
            tap.subscribe(subscriber)
        for subscriber in compared:  # a process that the script forks is no rank: it writes nothing on the board
            os.register_at_fork(after_in_child=functools.partial(tap.unsubscribe, subscriber))
        children.watch()
        children.watch_loaders(running)
        files.watch(self._tell_written)
        told.write(folder, self._told)
        self._arm()  # the lock may be gone before the thread has had it once
        self._thread = threading.Thread(target=self._report, daemon=True, name="lockstep")
        self._thread.start()

    def _report(self) -> None:
        while not self._over.wait(LOOK_S):
            try:
                with self._writes:
                    told.write(self._folder, self._now())
            except Exception:
                if not self._folder.exists():
                    return  # the judge has gone, and with it the folder
                traceback.print_exc()
            self._arm()  # after the report: it starts a thread, which on a loaded machine waits for a core like work

    def _arm(self) -> None:
        """Have the stacks written if this is not called again in time."""
        faulthandler.dump_traceback_later(SILENT_S, repeat=True, file=self._stacks)

    def look_at_start(self, *call: Any) -> None:
        """Say if the call of init_process_group that comes next can't succeed; `call` is as in `wrong_start`."""
        if wrong := wrong_start(self._told, *call):
            self._compared.note(wrong)

    def _tell_at_once(self, words: str) -> None:
        """Report what can't be right, and wait for the other ranks to say what they have called."""
        rank, now_s, standing = self._told.rank, time.monotonic(), _left()._replace(main=Doing(Kind.COMPUTES))
        found, all_said = Mismatch(words, now_s, last_calls(self._board), {rank: standing}), False
        self._keep(found, notes=_of_mismatch(_notes()), standing=standing)
        while found.calls and not all_said and time.monotonic() < now_s + told.OTHERS_S:
            time.sleep(LOOK_S / 5)
            said = told.read(self._folder)
            found = found._replace(standings=told.stood(said, found))
            all_said = found.standings.keys() >= said.keys()
        self._keep(found)

    def _keep(self, found: Mismatch, **further: Any) -> None:
        """Report what can't be right, now and in each later report: this rank may soon be dead."""
        with self._writes, suppress(OSError):
            self._told = self._so_far()._replace(mismatch=found, **further)
            told.write(self._folder, self._told)

    def _tell_written(self) -> None:
        """Report that this rank begins to write a file: torchrun may end it before its next report."""
        if self._writes.acquire(blocking=False):  # a report is a file that is written too
            try:
                with suppress(OSError):
                    told.write(self._folder, self._told._replace(written=files.written()))
            finally:
                self._writes.release()

    def _now(self) -> Told:
        """What this rank does; only the time while it moves."""
        still_s = self._stillness.measure_s()
        serial = max((op.serial for op in tap.ops()[-1:]), default=0)
        moves = serial != self._told.serial
        self._told = self._so_far()._replace(
            serial=serial, still_s=0.0 if moves else still_s, written=files.written(),
            standing=None if moves else report(_nothing, _nothing, self._stillness.polled).standing)
        return self._told

    def _so_far(self) -> Told:
        """What this rank last said of itself, with what has been noted since."""
        return self._told._replace(time_s=time.monotonic(), totals=self._totals.told(), noted=self._noted.told())

    def end(self, error: Failure | None) -> None:
        """Report for the last time, from the main thread, how the script has ended."""
        self._over.set()
        self._noted.close()  # Python collects garbage at its end
        self._thread.join(LOOK_S)
        faulthandler.cancel_dump_traceback_later()
        self._told = self._so_far()._replace(ended=True, standing=_left(), failure=error, notes=_notes())
        with self._writes, suppress(OSError):  # the folder may have been deleted
            told.write(self._folder, self._told)


def _nothing() -> None:
    return None


def _left() -> Standing:
    """What a rank whose script has ended had called, which the others may wait for."""
    try:
        return Standing(Doing(Kind.FINISHED), calls=history.calls(), models=history.models())
    except Exception:
        return Standing(Doing(Kind.FINISHED))


def _of_mismatch(notes: Notes | None) -> Notes | None:
    """What was noted before calls differed: if several threads make them, their order was left to chance."""
    return notes and notes._replace(threads=tuple(turns._replace(meet=True) for turns in notes.threads))


def _notes() -> Notes | None:
    """What this rank has noted for the audit; None if that fails."""
    try:
        return audit.notes(where.place_of)
    except Exception:
        return None
