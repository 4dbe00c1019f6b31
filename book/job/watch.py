"""L2: the thread of a rank that reports what the rank does, and what is noted of its calls."""
from __future__ import annotations

import faulthandler
import os
import threading
import time
import traceback
from io import FileIO
from pathlib import Path
from typing import Any

from book import audit, tap
from book.audit import Notes
from book.job import told
from book.job.noted import mapped, note
from book.job.told import Told
from book.launch import history, where
from book.launch.agreement import Agreement, CallMismatch
from book.launch.board import Board
from book.launch.child import Failure
from book.launch.history import History
from book.launch.left_out import Models
from book.launch.peers import Peers
from book.launch.report import Stillness, report
from book.launch.requests import Requests
from book.tap import Op, Subscriber
from book.waiting.doing import Doing, Kind
from book.waiting.hang import Group, Standing

# After so long without a report, a rank's stacks are written without the interpreter lock. That is safe where C code
# holds the lock, and may crash a process that runs Python: so not while torch is imported, before this thread reports.
SILENT_S = 3.0
LOOK_S = 0.5
STILL_S = 1.0  # a rank that has stood still for less says only that it is there


class Compared(Agreement):
    """Compares calls with those of this host's other ranks; a difference is noted, and the call goes on."""

    def __init__(self, board: Board) -> None:
        super().__init__(board)
        self.mismatch = ""

    def before(self, op: Op) -> None:
        if self.mismatch:
            return
        try:
            super().before(op)
        except CallMismatch as error:
            self.mismatch = str(error)


class Totals(Subscriber):
    """How often this process has called what in each group, and the bytes of its tensors."""

    def __init__(self) -> None:
        self._of: dict[tuple[Any, str], list[int]] = {}

    def before(self, op: Op) -> None:
        if op.inside:
            return
        total = self._of.setdefault((op.group, op.function or op.kind), [0, 0])
        total[0] += 1
        total[1] += op.num_bytes

    def told(self) -> dict[tuple[Group, str], tuple[int, int]]:
        """The sums so far."""
        return {(Group(group.name, tuple(sorted(group.ranks))), name): (calls, size)
                for (group, name), (calls, size) in list(self._of.items())}


class Watch:
    """What watches this rank from its first init_process_group to the end of its script."""

    def __init__(self, folder: Path, first: Told, stacks: FileIO) -> None:
        self._folder, self._told, self._stacks = folder, first._replace(entered=True), stacks
        self._stillness, self._over = Stillness(), threading.Event()
        board = Board.at(folder / told.BOARD, first.world_size)
        self._totals, self._compared = Totals(), Compared(board)
        audit.start()
        self._noted = note(first.rank, mapped(told.ring_file(folder, first.rank)))
        own: tuple[Subscriber, ...] = (Peers(), History(), Requests(), Models(), self._totals, self._compared)
        for subscriber in own:
            tap.subscribe(subscriber)
        # A process that the script forks is no rank: it writes nothing on the board.
        os.register_at_fork(after_in_child=lambda: tap.unsubscribe(self._compared))
        told.write(folder, self._told)
        self._arm()  # the lock may be gone before the thread has had it once
        self._thread = threading.Thread(target=self._report, daemon=True, name="lockstep")
        self._thread.start()

    def _report(self) -> None:
        while not self._over.wait(LOOK_S):
            try:
                told.write(self._folder, self._now())
            except Exception:
                if not self._folder.exists():
                    return  # the judge has gone, and with it the folder
                traceback.print_exc()
            self._arm()  # after the report: it starts a thread, which on a loaded machine waits for a core like work

    def _arm(self) -> None:
        """Have the stacks written if this is not called again in time."""
        faulthandler.dump_traceback_later(SILENT_S, repeat=True, file=self._stacks)

    def _now(self) -> Told:
        """What this rank does; only the time while it moves."""
        still_s = self._stillness.measure_s()
        serial = max((op.serial for op in tap.ops()[-1:]), default=0)
        moves = serial != self._told.serial
        self._told = self._told._replace(
            time_s=time.monotonic(), serial=serial, mismatch=self._compared.mismatch,
            still_s=0.0 if moves else still_s, totals=self._totals.told(), noted=self._noted.told(),
            standing=None if moves else report(_nothing, _nothing, self._stillness.polled).standing)
        return self._told

    def end(self, error: Failure | None) -> None:
        """Report for the last time, from the main thread, how the script has ended."""
        self._over.set()
        self._noted.close()  # Python collects garbage at its end
        self._thread.join(LOOK_S)
        faulthandler.cancel_dump_traceback_later()
        self._told = self._told._replace(
            time_s=time.monotonic(), ended=True, standing=_left(), mismatch=self._compared.mismatch,
            totals=self._totals.told(), noted=self._noted.told(), failure=error, notes=_notes())
        try:
            told.write(self._folder, self._told)
        except OSError:
            pass  # the folder has been deleted


def _nothing() -> None:
    return None


def _left() -> Standing:
    """What a rank whose script has ended had called, which the others may wait for."""
    try:
        return Standing(Doing(Kind.FINISHED), calls=history.calls(), models=history.models())
    except Exception:
        return Standing(Doing(Kind.FINISHED))


def _notes() -> Notes | None:
    """What this rank has noted for the audit; None if that fails."""
    try:
        return audit.notes(where.place_of)
    except Exception:
        return None
