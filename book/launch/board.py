"""L2: memory that the ranks of a host share, in which each notes the collectives that it calls.

Every rank has a list of the groups that it has called something in, and for each of them a ring of slots: slot
`number % DEPTH` holds its call `number`. A rank writes only its own part, and writes the number last, so that no reader
takes a half-written slot for a complete one. The launcher reads them too, even if a rank has died or can't answer.
"""
from __future__ import annotations

import functools
import itertools
import mmap
import os
import struct
from itertools import pairwise
from multiprocessing.reduction import DupFd
from typing import Any, NamedTuple

from book.launch import mail
from book.launch.transfer import new_file
from book.waiting.hang import Group

MAX_GROUPS, DEPTH, SLOT_BYTES = 64, 8, 512  # what a rank calls in further groups is not noted
NUM_ALIKE = 6  # things that must be the same on all ranks
# Number, checksums, line; lengths of the name, of who made it, of the file name and of the arguments.
_CALL = struct.Struct(f"<Q{NUM_ALIKE}IIHHHH")
_NUMBER = struct.Struct("<Q")
_GROUP = struct.Struct("<HH")  # lengths of the name and of the members' bits
_PART_BYTES = MAX_GROUPS * SLOT_BYTES * (1 + DEPTH + 1)


class NotedCall(NamedTuple):
    """What a rank has noted of a call of a collective, the `number`-th in its group."""
    number: int
    alike: tuple[int, ...]  # a checksum of each thing that must be the same on all ranks
    name: str
    arguments: str  # as a reader sees them, "float32 [4], SUM"; long ones are cut
    filename: str
    line: int
    by: str = ""  # the part of torch that made it, "DDP in backward"


class Board:
    """The notes of a host's `ranks`, which follow one another, and the `mail` on their messages.

    A process that multiprocessing starts with it as an argument shares it.
    """

    def __init__(self, ranks: range, file: int | None = None) -> None:
        self._ranks = ranks
        self._places: dict[tuple[int, Group], int] = {}
        size = len(ranks) * _PART_BYTES
        self._file = new_file(size + len(ranks) * mail.PART_BYTES) if file is None else file
        self._memory = mmap.mmap(self._file, size)
        self.mail = mail.MessageBoard(self._file, size, ranks)

    @classmethod
    def at(cls, path: str | os.PathLike[str], ranks: range) -> Board:
        """The board in a file, which whoever comes first makes."""
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        os.ftruncate(file, len(ranks) * (_PART_BYTES + mail.PART_BYTES))
        return cls(ranks, file)

    def __reduce__(self) -> tuple[Any, ...]:
        return _shared, (self._ranks, DupFd(self._file))

    def close(self) -> None:
        """Release the memory and the file."""
        self._memory.close()
        self.mail.close()
        os.close(self._file)

    def members(self, group: Group) -> list[int]:
        """The ranks of a group that note their calls here: those of other hosts do elsewhere."""
        return [rank for rank in group.ranks if rank in self._ranks]

    def note(self, rank: int, group: Group, call: NotedCall) -> None:
        """Write down a call of this rank's own; its number counts the rank's calls in that group, from 1."""
        place = self._place(rank, group, new=True)
        if place is None:
            return
        self._put(self._slot(rank, place, call.number), call)

    def _put(self, at: int, call: NotedCall) -> None:
        lengths, texts = _encoded(call.name, call.by, call.filename, call.arguments)
        _NUMBER.pack_into(self._memory, at, 0)
        self._write(at + _CALL.size, texts)
        _CALL.pack_into(self._memory, at, 0, *call.alike, call.line, *lengths)
        _NUMBER.pack_into(self._memory, at, call.number)

    def refuse(self, rank: int, group: Group, number: int) -> None:
        """Take back one of this rank's own calls that torch has refused; `refused` still returns it."""
        place, call = self._place(rank, group), self.read(rank, group, number)
        if place is not None and call is not None:
            self._put(self._refused_slot(rank, place), call)
            _NUMBER.pack_into(self._memory, self._slot(rank, place, number), 0)

    def refused(self, rank: int, group: Group) -> NotedCall | None:
        """The last call in a group that this rank has taken back."""
        place = self._place(rank, group)
        return None if place is None else self._call(self._refused_slot(rank, place))

    def read(self, rank: int, group: Group, number: int) -> NotedCall | None:
        """A rank's call with this number in a group; None if it was not made yet, or `DEPTH` or more calls ago."""
        place = self._place(rank, group)
        call = None if place is None else self._call(self._slot(rank, place, number))
        return call if call is not None and call.number == number else None

    def alike(self, rank: int, group: Group, number: int) -> tuple[int, ...] | None:
        """What `read` returns has as `alike`, in a part of the time."""
        place = self._place(rank, group)
        at = 0 if place is None else self._slot(rank, place, number)
        if place is None or _NUMBER.unpack_from(self._memory, at)[0] != number:
            return None
        alike = _CALL.unpack_from(self._memory, at)[1:1 + NUM_ALIKE]
        return alike if _NUMBER.unpack_from(self._memory, at)[0] == number else None

    def last_calls(self) -> dict[Group, dict[int, NotedCall]]:
        """For each group: the last call in it of each rank that has made one."""
        last: dict[Group, dict[int, NotedCall]] = {}
        for rank in self._ranks:
            for place, group in enumerate(self._groups(rank)):
                calls = (self._call(self._slot(rank, place, number)) for number in range(DEPTH))
                known = [call for call in calls if call is not None]
                if known:
                    last.setdefault(group, {})[rank] = max(known)
        return last

    def _call(self, at: int) -> NotedCall | None:
        slot = self._memory[at:at + SLOT_BYTES]
        fields = _CALL.unpack_from(slot)
        number, line, *lengths = fields[0], *fields[-5:]
        if not number or _NUMBER.unpack_from(self._memory, at)[0] != number:
            return None  # empty, or being written
        ends = list(itertools.accumulate(lengths, initial=_CALL.size))
        name, by, filename, arguments = (slot[start:end].decode(errors="replace") for start, end in pairwise(ends))
        return NotedCall(number, fields[1:1 + NUM_ALIKE], name, arguments, filename, line, by)

    def _groups(self, rank: int) -> list[Group]:
        """A rank's groups, in the order of their places."""
        groups = []
        for place in range(MAX_GROUPS):
            at = self._part(rank) + place * SLOT_BYTES
            name, bits = _GROUP.unpack_from(self._memory, at)
            if not bits:
                break
            start = at + _GROUP.size
            members = int.from_bytes(self._memory[start + name:start + name + bits], "little")
            groups.append(Group(self._memory[start:start + name].decode(),
                                tuple(rank for rank in range(8 * bits) if members >> rank & 1)))
        return groups

    def _place(self, rank: int, group: Group, new: bool = False) -> int | None:
        """The place of a group in a rank's part; None if the rank has not called anything in that group."""
        place = self._places.get((rank, group))
        if place is None:
            groups = self._groups(rank)
            fits = _GROUP.size + len(group.name.encode()) + group.ranks[-1] // 8 < SLOT_BYTES  # few thousand ranks
            if group not in groups and new and fits and len(groups) < MAX_GROUPS:
                self._add(self._part(rank) + len(groups) * SLOT_BYTES, group)
                groups.append(group)
            self._places.update({(rank, known): at for at, known in enumerate(groups)})
            place = self._places.get((rank, group))
        return place

    def _add(self, at: int, group: Group) -> None:
        """Write down a new group: its name, and a bit for each rank up to its last."""
        name, bits = group.name.encode(), sum(1 << rank for rank in group.ranks)
        members = bits.to_bytes(group.ranks[-1] // 8 + 1, "little")
        self._write(at + _GROUP.size, name + members)
        _GROUP.pack_into(self._memory, at, len(name), len(members))

    def _part(self, rank: int) -> int:
        """Where a rank's part begins."""
        return (rank - self._ranks.start) * _PART_BYTES

    def _slot(self, rank: int, place: int, number: int) -> int:
        return self._part(rank) + (MAX_GROUPS + place * (DEPTH + 1) + number % DEPTH) * SLOT_BYTES

    def _refused_slot(self, rank: int, place: int) -> int:
        return self._part(rank) + (MAX_GROUPS + place * (DEPTH + 1) + DEPTH) * SLOT_BYTES

    def _write(self, at: int, data: bytes) -> None:
        self._memory[at:at + len(data)] = data


@functools.lru_cache(1024)
def _encoded(name: str, by: str, filename: str, arguments: str) -> tuple[tuple[int, ...], bytes]:
    """The lengths of a call's texts, and all of them; of the arguments as much as there is room for."""
    fixed = [text.encode() for text in (name, by, filename)]
    texts = [*fixed, arguments.encode()[:max(0, SLOT_BYTES - _CALL.size - sum(map(len, fixed)))]]
    return tuple(map(len, texts)), b"".join(texts)[:SLOT_BYTES - _CALL.size]


def _shared(ranks: range, file: Any) -> Board:
    return Board(ranks, file.detach())
