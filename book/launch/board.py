"""L2: memory that all ranks of a launch share, in which each notes the collectives that it calls.

For every group there is a ring of slots for each rank; slot `number % DEPTH` holds its call `number`. A rank writes its
own slots only, and the number last, so that nobody reads half a slot. The launcher reads them too: also those of a rank
that has died or can't answer.
"""
from __future__ import annotations

import mmap
import os
import struct
import tempfile
import zlib
from multiprocessing.reduction import DupFd
from typing import Any, NamedTuple

NUM_GROUPS, DEPTH, SLOT_BYTES = 64, 8, 512
_HEAD = struct.Struct("<QQHH")  # number, checksum of the group's name, lengths of key and words
_NUMBER = struct.Struct("<Q")


class Call(NamedTuple):
    """What a rank has noted of a call: what must be the same on all ranks, and words for a reader."""
    number: int
    key: bytes
    words: str


class Board:
    """The notes of `world_size` ranks; a process that multiprocessing starts with it as an argument shares it."""

    def __init__(self, world_size: int, file: int | None = None) -> None:
        self._world_size = world_size
        self._file = _new_file(_num_bytes(world_size)) if file is None else file
        self._memory = mmap.mmap(self._file, _num_bytes(world_size))

    def __reduce__(self) -> tuple[Any, ...]:
        return _shared, (self._world_size, DupFd(self._file))

    def close(self) -> None:
        """Give the memory and the file back."""
        self._memory.close()
        os.close(self._file)

    def note(self, rank: int, group: str, call: Call) -> None:
        """Write down a call of this rank's own; its number counts the rank's calls in that group, from 1."""
        at, words = self._slot(rank, group, call.number), call.words.encode()
        words = words[:SLOT_BYTES - _HEAD.size - len(call.key)]
        _NUMBER.pack_into(self._memory, at, 0)
        end = at + _HEAD.size + len(call.key)
        self._memory[end - len(call.key):end] = call.key
        self._memory[end:end + len(words)] = words
        _HEAD.pack_into(self._memory, at, 0, _checksum(group), len(call.key), len(words))
        _NUMBER.pack_into(self._memory, at, call.number)

    def read(self, rank: int, group: str, number: int) -> Call | None:
        """A rank's call with this number in a group; None if it has not come so far, or is far beyond."""
        at = self._slot(rank, group, number)
        found, checksum, key_bytes, words_bytes = _HEAD.unpack_from(self._memory, at)
        if found != number or checksum != _checksum(group):
            return None
        start = at + _HEAD.size
        key = self._memory[start:start + key_bytes]
        words = self._memory[start + key_bytes:start + key_bytes + words_bytes]
        if _NUMBER.unpack_from(self._memory, at)[0] != number:
            return None  # written anew meanwhile
        return Call(number, key, words.decode(errors="replace"))

    def _slot(self, rank: int, group: str, number: int) -> int:
        place = (_checksum(group) % NUM_GROUPS * self._world_size + rank) * DEPTH + number % DEPTH
        return place * SLOT_BYTES


def _shared(world_size: int, file: Any) -> Board:
    return Board(world_size, file.detach())


def _new_file(num_bytes: int) -> int:
    """A file without a name; pages of it that nobody touches take no memory."""
    with tempfile.TemporaryFile() as file:
        os.truncate(file.fileno(), num_bytes)
        return os.dup(file.fileno())


def _num_bytes(world_size: int) -> int:
    return NUM_GROUPS * world_size * DEPTH * SLOT_BYTES


def _checksum(group: str) -> int:
    return zlib.crc32(group.encode())
