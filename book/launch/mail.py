"""L2: memory that the ranks of a host share, in which each notes the messages that it sends and receives.

Every rank writes into slots of its own only. What it notes of message `number` of a channel is in the slot that the
channel's first byte and the number give, until another note takes that slot; the key is written last, so that no
reader takes a half-written note.
"""
from __future__ import annotations

import mmap
import struct
from typing import NamedTuple

from book.tap.log import Place

DEPTH, CHANNELS, SLOT_BYTES = 32, 128, 512  # of a channel's messages the last ones, of as many channels
PART_BYTES = CHANNELS * DEPTH * SLOT_BYTES
MAX_CLOCK = 32  # ranks: more do not note what they know of one another
_FINISHED, _CLOCK, _NOTE = 16, 20, 20 + 4 * MAX_CLOCK  # where these begin in a slot, after channel and number
_NUMBER, _NONE = struct.Struct("<QI"), bytes(8)
_FIXED = struct.Struct("<QHIHH")  # elements, bytes of one, line, lengths of the tensor in words and of the file name


class Sent(NamedTuple):
    """One side of a message: its dtype, its shape, and the line that sends or receives it."""
    dtype: str  # "float32"
    shape: tuple[int, ...]
    itemsize: int
    place: Place | None

    @property
    def num_elements(self) -> int:
        """How many elements the shape has."""
        count = 1
        for size in self.shape:
            count *= size
        return count

    @property
    def words(self) -> str:
        """The tensor in words: "float32 [4]"."""
        return f"{self.dtype} {list(self.shape)}"

    def packed(self) -> bytes:
        """As bytes that fit into a slot; those of two sides begin alike where dtype and shape are the same."""
        filename, line = self.place or ("", 0)
        texts = [f"{self.dtype} {','.join(map(str, self.shape))}".encode(), filename.encode(errors="replace")]
        fixed = _FIXED.pack(self.num_elements, self.itemsize, line, *map(len, texts))
        return (fixed + b"".join(texts))[:SLOT_BYTES - _NOTE]


def are_alike(one: bytes, other: bytes) -> bool:
    """Whether two packed sides have the same dtype and the same shape."""
    end = _FIXED.size + int.from_bytes(one[14:16], "little")
    return one[:10] == other[:10] and one[14:16] == other[14:16] and one[_FIXED.size:end] == other[_FIXED.size:end]


def unpacked(note: bytes) -> Sent:
    """The side of a message that was packed into a slot."""
    _, itemsize, line, length, place = _FIXED.unpack_from(note)
    dtype, _, shape = note[_FIXED.size:_FIXED.size + length].decode().partition(" ")
    filename = note[_FIXED.size + length:_FIXED.size + length + place].decode(errors="replace")
    return Sent(dtype, tuple(map(int, filter(None, shape.split(",")))), itemsize, (filename, line) if line else None)


class MessageBoard:
    """The notes of a host's ranks in a shared file, from byte `start` on; of other ranks nothing is known."""

    def __init__(self, file: int, start: int, ranks: range) -> None:
        self._ranks = ranks
        self._memory = mmap.mmap(file, len(ranks) * PART_BYTES, offset=start)

    def close(self) -> None:
        """Release the memory."""
        self._memory.close()

    def post(self, rank: int, channel: bytes, number: int, note: bytes, clock: bytes = b"") -> None:
        """Note this rank's own side of a message; `channel` has 8 bytes, the `clock` 4 for each of `MAX_CLOCK` ranks.
        """
        if rank not in self._ranks:
            return
        at, memory = self._slot(rank, channel, number), self._memory
        memory[at:at + 8] = _NONE
        memory[at + _NOTE:at + _NOTE + len(note)] = note
        memory[at + 8:at + _CLOCK + len(clock)] = _NUMBER.pack(number, 0) + clock
        memory[at:at + 8] = channel

    def read(self, rank: int, channel: bytes, number: int) -> bytes | None:
        """What a rank has noted of a message; None if it has not, or if another note has taken the slot."""
        return self._read(rank, channel, number, _NOTE, SLOT_BYTES)

    def clock(self, rank: int, channel: bytes, number: int) -> bytes | None:
        """The clock that a rank had when it noted a message; None if that is not known."""
        return self._read(rank, channel, number, _CLOCK, _NOTE)

    def finish(self, rank: int, channel: bytes, number: int, time: int) -> None:
        """Note that this rank has waited for its side of a message, as the `time`-th of all, from 1."""
        at = self._find(rank, channel, number)
        if at is not None:
            self._memory[at + _FINISHED:at + _CLOCK] = time.to_bytes(4, "little")

    def finished(self, rank: int, channel: bytes, number: int) -> int:
        """The time that a rank gave when it had waited for its side of a message; 0 if it has not, or is not known."""
        time = self._read(rank, channel, number, _FINISHED, _CLOCK)
        return 0 if time is None else int.from_bytes(time, "little")

    def take_back(self, rank: int, channel: bytes, number: int) -> None:
        """Forget a note of this rank's own."""
        at = self._find(rank, channel, number)
        if at is not None:
            self._memory[at:at + 8] = _NONE

    def _read(self, rank: int, channel: bytes, number: int, first: int, end: int) -> bytes | None:
        """Some bytes of a slot that has this key, before they are read and after."""
        at = self._find(rank, channel, number)
        if at is None:
            return None
        found = self._memory[at + first:at + end]
        return found if self._find(rank, channel, number) is not None else None

    def _find(self, rank: int, channel: bytes, number: int) -> int | None:
        """Where the slot with this key begins; None if there is none."""
        if rank not in self._ranks:
            return None
        at = self._slot(rank, channel, number)
        return at if self._memory[at:at + 16] == channel + number.to_bytes(8, "little") else None

    def _slot(self, rank: int, channel: bytes, number: int) -> int:
        within = channel[0] % CHANNELS * DEPTH + number % DEPTH
        return (rank - self._ranks.start) * PART_BYTES + within * SLOT_BYTES
