"""L2: memory that all ranks of a launch share, in which each notes the collectives that it calls.

Every rank has a list of the groups that it has called something in, and for each of them a ring of slots: slot
`number % DEPTH` holds its call `number`. A rank writes only its own part, and writes the number last, so that no reader
takes a half-written slot for a complete one. The launcher reads them too, even if a rank has died or can't answer.
"""
from __future__ import annotations

import mmap
import os
import struct
from multiprocessing.reduction import DupFd
from typing import Any, NamedTuple

from book.launch.transfer import new_file

MAX_GROUPS, DEPTH, SLOT_BYTES = 64, 8, 512  # what a rank calls in further groups is not noted
_HEAD = struct.Struct("<QHH")  # number, lengths of key and words
_NUMBER = struct.Struct("<Q")
_LENGTH = struct.Struct("<H")
_PART_BYTES = MAX_GROUPS * SLOT_BYTES * (1 + DEPTH + 1)


class Call(NamedTuple):
    """What a rank has noted of a call: a key that must be the same on all ranks, and words for a reader."""
    number: int
    key: bytes
    words: str


class Board:
    """The notes of `world_size` ranks; a process that multiprocessing starts with it as an argument shares it."""

    def __init__(self, world_size: int, file: int | None = None) -> None:
        self._world_size = world_size
        self._places: dict[tuple[int, str], int] = {}
        self._file = new_file(world_size * _PART_BYTES) if file is None else file
        self._memory = mmap.mmap(self._file, world_size * _PART_BYTES)

    def __reduce__(self) -> tuple[Any, ...]:
        return _shared, (self._world_size, DupFd(self._file))

    def close(self) -> None:
        """Release the memory and the file."""
        self._memory.close()
        os.close(self._file)

    def note(self, rank: int, group: str, call: Call) -> None:
        """Write down a call of this rank's own; its number counts the rank's calls in that group, from 1."""
        place = self._place(rank, group, new=True)
        if place is None:
            return
        self._put(self._slot(rank, place, call.number), call)

    def _put(self, at: int, call: Call) -> None:
        words = call.words.encode()[:SLOT_BYTES - _HEAD.size - len(call.key)]
        _NUMBER.pack_into(self._memory, at, 0)
        self._write(at + _HEAD.size, call.key + words)
        _HEAD.pack_into(self._memory, at, 0, len(call.key), len(words))
        _NUMBER.pack_into(self._memory, at, call.number)

    def refuse(self, rank: int, group: str, number: int) -> None:
        """Take back one of this rank's own calls that torch has refused; `refused` still returns it."""
        place, call = self._place(rank, group), self.read(rank, group, number)
        if place is not None and call is not None:
            self._put(self._refused_slot(rank, place), call)
            _NUMBER.pack_into(self._memory, self._slot(rank, place, number), 0)

    def refused(self, rank: int, group: str) -> Call | None:
        """The last call in a group that this rank has taken back."""
        place = self._place(rank, group)
        return None if place is None else self._call(self._refused_slot(rank, place))

    def read(self, rank: int, group: str, number: int) -> Call | None:
        """A rank's call with this number in a group; None if it was not made yet, or `DEPTH` or more calls ago."""
        place = self._place(rank, group)
        call = None if place is None else self._call(self._slot(rank, place, number))
        return call if call is not None and call.number == number else None

    def last_calls(self) -> dict[str, dict[int, Call]]:
        """For each group: the last call in it of each rank that has made one."""
        last: dict[str, dict[int, Call]] = {}
        for rank in range(self._world_size):
            for place, group in enumerate(self._groups(rank)):
                calls = (self._call(self._slot(rank, place, number)) for number in range(DEPTH))
                known = [call for call in calls if call is not None]
                if known:
                    last.setdefault(group, {})[rank] = max(known)
        return last

    def _call(self, at: int) -> Call | None:
        number, key_bytes, words_bytes = _HEAD.unpack_from(self._memory, at)
        start = at + _HEAD.size
        key = self._memory[start:start + key_bytes]
        words = self._memory[start + key_bytes:start + key_bytes + words_bytes]
        if not number or _NUMBER.unpack_from(self._memory, at)[0] != number:
            return None  # empty, or being written
        return Call(number, key, words.decode(errors="replace"))

    def _groups(self, rank: int) -> list[str]:
        """The names of a rank's groups, in the order of their places; long names are cut."""
        names = []
        for place in range(MAX_GROUPS):
            at = rank * _PART_BYTES + place * SLOT_BYTES
            length, = _LENGTH.unpack_from(self._memory, at)
            if not length:
                break
            names.append(self._memory[at + _LENGTH.size:at + _LENGTH.size + length].decode())
        return names

    def _place(self, rank: int, group: str, new: bool = False) -> int | None:
        """The place of a group in a rank's part; None if the rank has not called anything in that group."""
        group = group[:SLOT_BYTES - _LENGTH.size]
        if (rank, group) not in self._places:
            names = self._groups(rank)
            if group not in names and new and len(names) < MAX_GROUPS:
                at = rank * _PART_BYTES + len(names) * SLOT_BYTES
                self._write(at + _LENGTH.size, group.encode())
                _LENGTH.pack_into(self._memory, at, len(group))
                names.append(group)
            self._places.update({(rank, name): place for place, name in enumerate(names)})
        return self._places.get((rank, group))

    def _slot(self, rank: int, place: int, number: int) -> int:
        return rank * _PART_BYTES + (MAX_GROUPS + place * (DEPTH + 1) + number % DEPTH) * SLOT_BYTES

    def _refused_slot(self, rank: int, place: int) -> int:
        return rank * _PART_BYTES + (MAX_GROUPS + place * (DEPTH + 1) + DEPTH) * SLOT_BYTES

    def _write(self, at: int, data: bytes) -> None:
        self._memory[at:at + len(data)] = data


def _shared(world_size: int, file: Any) -> Board:
    return Board(world_size, file.detach())
