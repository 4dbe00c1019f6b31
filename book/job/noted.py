"""L2: what a rank notes of its calls and of the phases around them, in a ring that is bounded and outlives the process.
"""
from __future__ import annotations

import itertools
import mmap
import os
import struct
import time
from collections.abc import Callable, Sequence
from typing import Any

from book import tap
from book.look.timelines import NUM_BYTES, NUM_ROWS, ROW
from book.tap import Op, Subscriber
from book.waiting.hang import Group

_ROW, _NUMBER, _TIME = struct.Struct("<QdddIIQQ"), struct.Struct("<Q"), struct.Struct("<d")  # as in ROW
_TIMES = struct.Struct("<Qddd")  # the row's first fields, all of eight bytes
WAITS, END = (ROW.fields[name][1] for name in ("waits_s", "end_s")) if ROW.fields else (0, 0)


def _call(serial: int) -> int:
    """Where a call's row lies."""
    return serial % NUM_ROWS * _ROW.size


def _phase(number: int) -> int:
    """Where a phase's row lies: behind all calls."""
    return (NUM_ROWS + number % NUM_ROWS) * _ROW.size


class RingNotes(Subscriber):
    """Notes calls and phases in a memory that others may map; the last `NUM_ROWS` of each."""

    def __init__(self, memory: Any) -> None:
        self._memory = memory
        self._names: dict[str, int] = {}
        self._groups: dict[Any, int] = {}
        self._count = itertools.count(1)
        self._is_rank, self.on_gpu = True, False
        # A process that the script forks, such as a loader's worker, shares the memory and is no rank.
        os.register_at_fork(after_in_child=self.close)

    def close(self) -> None:
        """Note nothing from now on."""
        self._is_rank = False

    def issued(self, op: Op, tensors: Sequence[Any]) -> None:
        group = self._groups.get(op.group)
        if group is None:
            group = self._groups.setdefault(op.group, len(self._groups))
        self.on_gpu = self.on_gpu or bool(tensors and tensors[0].is_cuda)
        if self._is_rank:
            _ROW.pack_into(self._memory, _call(op.serial), op.serial, time.monotonic(), 0.0, 0.0,
                           self._name(op.function or op.kind), group, op.number, op.num_bytes)

    def withdrawn(self, op: Op) -> None:
        if self._is_rank and self._is_there(_call(op.serial), op.serial):
            _NUMBER.pack_into(self._memory, _call(op.serial), 0)

    def waits(self, op: Op) -> None:
        self._mark(_call(op.serial), op.serial, WAITS)

    def waited(self, op: Op, source_rank: Callable[[], int] | None) -> None:
        self._mark(_call(op.serial), op.serial, END)

    def begin(self, phase: str) -> int:
        """Note that a phase begins; returns its number, for `end`."""
        number = next(self._count)
        if self._is_rank:
            _ROW.pack_into(self._memory, _phase(number), number, time.monotonic(), 0.0, 0.0, self._name(phase), 0, 0, 0)
        return number

    def end(self, number: int) -> None:
        """Note that a phase has ended."""
        self._mark(_phase(number), number, END)

    def _mark(self, row: int, number: int, field: int) -> None:
        """Fill in a time, unless it is there or the ring has gone round since."""
        if self._is_rank:
            there = _TIMES.unpack_from(self._memory, row)
            if there[0] == number and not there[field // _TIME.size]:
                _TIME.pack_into(self._memory, row + field, time.monotonic())

    def _is_there(self, row: int, number: int) -> bool:
        return bool(_NUMBER.unpack_from(self._memory, row)[0] == number)

    def _name(self, text: str) -> int:
        number = self._names.get(text)
        return self._names.setdefault(text, len(self._names)) if number is None else number

    def told(self) -> tuple[tuple[str, ...], tuple[Group, ...], bool]:
        """What the numbers in rows stand for, names and groups; and whether tensors were on a GPU."""
        return (*list(self._names),), tuple(each.shared for each in list(self._groups)), self.on_gpu


def mapped(path: str | os.PathLike[str]) -> Any:
    """The memory of a ring in a file, which is made if it is not there."""
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        os.ftruncate(file, NUM_BYTES)
        return mmap.mmap(file, NUM_BYTES)
    finally:
        os.close(file)


def note(memory: Any) -> RingNotes:
    """Note the calls and phases of this process from now on, in a memory of NUM_BYTES bytes."""
    from book.job import phases
    tap.start()
    noted = RingNotes(memory)
    tap.subscribe(noted)
    phases.install(noted)
    return noted
