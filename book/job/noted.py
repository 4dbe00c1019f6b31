"""L2: what a rank notes of its calls and of the phases around them, in a ring that is bounded and outlives the process.

    from book.job.noted import note
    def train():
        noted = note()  # before init_process_group
        ...
        return noted.timeline()
"""
from __future__ import annotations

import itertools
import mmap
import os
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from book import tap
from book.look.timelines import NUM_BYTES, NUM_ROWS, ROW, Timeline, timeline_of
from book.tap import Op, Subscriber
from book.waiting.hang import Group


class Noted(Subscriber):
    """Notes calls and phases in a memory that others may map; the last `NUM_ROWS` of each."""

    def __init__(self, rank: int, memory: Any) -> None:
        self.rank = rank
        self._memory = memory
        rows = np.frombuffer(memory, ROW)
        self._calls, self._phases = rows[:NUM_ROWS], rows[NUM_ROWS:]
        self._columns = {name: self._calls[name] for name in ("waits_s", "end_s")}
        self._names: dict[str, int] = {}
        self._groups: dict[Any, int] = {}
        self._count = itertools.count(1)
        self._is_rank, self.on_gpu = True, False
        # A process that the script forks, such as a loader's worker, shares the memory and is no rank.
        os.register_at_fork(after_in_child=self._forked)

    def _forked(self) -> None:
        self._is_rank = False

    def issued(self, op: Op, tensors: Sequence[Any]) -> None:
        if not self._is_rank:
            return
        group = self._groups.get(op.group)
        if group is None:
            group = self._groups.setdefault(op.group, len(self._groups))
        self.on_gpu = self.on_gpu or bool(tensors and tensors[0].is_cuda)
        self._calls[op.serial % NUM_ROWS] = (op.serial, time.monotonic(), 0.0, 0.0, self._name(op.function or op.kind),
                                             group, op.number, op.num_bytes)

    def withdrawn(self, op: Op) -> None:
        row = op.serial % NUM_ROWS
        if self._is_rank and self._calls["number"][row] == op.serial:
            self._calls["number"][row] = 0

    def waits(self, op: Op) -> None:
        self._mark(op, "waits_s")

    def waited(self, op: Op, source_rank: Callable[[], int] | None) -> None:
        self._mark(op, "end_s")

    def _mark(self, op: Op, field: str) -> None:
        """Fill in a time, unless it is there or the ring has gone round since."""
        row, column = op.serial % NUM_ROWS, self._columns[field]
        if self._is_rank and self._calls["number"][row] == op.serial and not column[row]:
            column[row] = time.monotonic()

    def begin(self, phase: str) -> int:
        """Note that a phase begins; returns its number, for `end`."""
        number = next(self._count)
        if self._is_rank:
            self._phases[number % NUM_ROWS] = (number, time.monotonic(), 0.0, 0.0, self._name(phase), 0, 0, 0)
        return number

    def end(self, number: int) -> None:
        """Note that a phase has ended."""
        row = number % NUM_ROWS
        if self._is_rank and self._phases["number"][row] == number:
            self._phases["end_s"][row] = time.monotonic()

    def _name(self, text: str) -> int:
        number = self._names.get(text)
        return self._names.setdefault(text, len(self._names)) if number is None else number

    def told(self) -> tuple[tuple[str, ...], tuple[Group, ...], bool]:
        """What the numbers in rows stand for, names and groups; and whether tensors were on a GPU."""
        groups = [Group(each.name, tuple(sorted(each.ranks))) for each in list(self._groups)]
        return (*list(self._names),), tuple(groups), self.on_gpu

    def timeline(self) -> Timeline:
        """What has been noted so far."""
        return timeline_of(self.rank, self._memory, *self.told())


def mapped(path: str | os.PathLike[str]) -> Any:
    """The memory of a ring in a file, which is made if it is not there."""
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        os.ftruncate(file, NUM_BYTES)
        return mmap.mmap(file, NUM_BYTES)
    finally:
        os.close(file)


def note(rank: int | None = None, memory: Any = None) -> Noted:
    """Note the calls and phases of this process from now on; the rank is that of its environment unless given."""
    from book.job import phases
    tap.start()
    noted = Noted(int(os.environ.get("RANK", 0)) if rank is None else rank,
                  bytearray(NUM_BYTES) if memory is None else memory)
    tap.subscribe(noted)
    phases.install(noted)
    return noted
