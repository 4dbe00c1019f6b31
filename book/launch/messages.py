"""L2: check that each message is received as what it was sent as: its dtype, and its number of elements.

gloo moves bytes. It does not compare dtypes, takes a message that is shorter than its tensor, and ends the process at a
longer one. Under `launch` each side of a message first notes what it is in the `mail` of the ranks, so the later one
finds a difference. An all-to-all is a message between each two ranks.
"""
from __future__ import annotations

import functools
import hashlib
import time
import zlib
from array import array
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from book.audit import shorter
from book.launch import where
from book.launch.agreement import WAIT_S, CallMismatch
from book.launch.mail import MAX_CLOCK, MessageBoard, Sent, are_alike, unpacked
from book.tap import Op, Subscriber
from book.tap.log import Described, OwnGroup, Place

if TYPE_CHECKING:
    import torch

BYTES = {"uint8", "int8"}  # a tensor of these may stand for one of any dtype
PAIRS = ({"complex64", "float32"}, {"complex128", "float64"})
MOST_LINES, MOST_CHANNELS = 6, 4096


class _Channel:
    """The messages of one tag from one rank to another, as one of the two sees them."""

    def __init__(self, group: OwnGroup, source: int, target: int, kind: str) -> None:
        self.group, self.peer = group, target if group.rank == source else source
        self.is_open, self.count, self.serial = True, 0, 0
        sides = [_key(group, source, target, kind, side) for side in ("send", "recv")]
        self.keys = dict(zip(("send", "recv"), sides))
        self._last: tuple[Described | None, Place | None, bytes] = None, None, b""

    def note(self, tensor: Described, place: Place | None) -> bytes:
        """The own side of a message, most often like that of the one before."""
        if self._last[0] != tensor or self._last[1] != place:
            self._last = tensor, place, _note(tensor, place)
        return self._last[2]


class MessageAgreement(Subscriber):
    """Makes a send, a receive or an all-to-all raise `CallMismatch` where the other side is known to differ."""

    def __init__(self, mail: MessageBoard, world_size: int) -> None:
        self._mail = mail
        # Of each rank: how many of its receives had come to an end before what this rank knows of.
        self._clock = array("I", [0] * world_size) if world_size <= MAX_CLOCK else array("I")
        self._channels: dict[tuple[Any, ...], _Channel] = {}
        self._groups: dict[tuple[str, tuple[int, ...]], OwnGroup] = {}
        self._exchanges: dict[OwnGroup, int] = {}
        self._anyones: dict[tuple[Any, ...], _Anyone] = {}
        self._numbers: dict[int, tuple[_Channel, int]] = {}  # of what was not waited for, by serial

    def issued(self, op: Op, tensors: Sequence[torch.Tensor]) -> None:
        if op.is_message:
            self._message(op)
        elif op.kind == "all_to_all" and op.group.rank in op.group.ranks and tensors and not tensors[0].is_meta:
            self._exchange(op, tensors)

    def _message(self, op: Op) -> None:
        channel = self._channel(op, op.peer)
        if channel is None:
            return
        channel.count += 1
        channel.serial = op.serial
        own, other = ("send", "recv") if op.kind == "send" else ("recv", "send")
        note = channel.note(op.tensors[0], op.place)
        self._mail.post(op.group.rank, channel.keys[own], channel.count, note, self._clock.tobytes())
        self._numbers[op.serial] = channel, channel.count
        theirs = self._mail.read(channel.peer, channel.keys[other], channel.count)
        if theirs is not None and not are_alike(note, theirs):
            sent, received = (note, theirs) if op.kind == "send" else (theirs, note)
            _compare(sent, received, *_ends(op.group.rank, channel.peer, op.kind))

    def _channel(self, op: Op, peer: int | None) -> _Channel | None:
        """The channel of a message; None if it is not known how its messages are counted."""
        at = id(op.group), peer, op.tag, op.kind
        channel = self._channels.get(at)
        if channel is not None and not self._anyones:
            return channel if channel.is_open else None
        tag = 0 if "nccl" in op.group.backend and "gloo" not in op.group.backend else op.tag  # NCCL has no tags
        anyone = self._anyones.get((id(op.group), tag)) if op.kind == "recv" else None
        if peer is None:
            if anyone is None:
                anyone = self._anyones[id(op.group), tag] = _Anyone()
                anyone.is_sure = len(self._channels) < MOST_CHANNELS and not any(
                    at[0] == id(op.group) and at[2:] == (tag, "recv") for at in self._channels)
            anyone.issued(op)
            return None
        if anyone is not None:
            anyone.is_sure = False
            return None
        if channel is None:
            at = id(op.group), peer, tag, op.kind
            ends = _ends(op.group.rank, peer, op.kind)
            channel = self._channels.get(at)
        if channel is None and len(self._channels) >= MOST_CHANNELS:
            return None
        if channel is None:
            channel = self._channels[at] = _Channel(op.group, *ends, f"tag {tag}")
            # A group of the same name that was there before has left its notes.
            channel.is_open = self._groups.setdefault((op.group.name, op.group.ranks), op.group) is op.group
        return channel if channel.is_open else None

    def withdrawn(self, op: Op) -> None:
        self._numbers.pop(op.serial, None)
        channel = self._channel(op, op.peer) if op.is_message and op.peer is not None else None
        if channel is not None and channel.serial == op.serial:
            self._mail.take_back(op.group.rank, channel.keys[op.kind], channel.count)
            channel.count -= 1

    def dropped(self, op: Op) -> None:
        """Compare no further messages of a channel: it is not known whether this one has been moved."""
        self._numbers.pop(op.serial, None)
        channel = self._channel(op, op.peer) if op.peer is not None else None
        if channel is not None:
            channel.is_open = False
            self._mail.take_back(op.group.rank, channel.keys[op.kind], channel.count)

    def waited(self, op: Op, source_rank: Callable[[], int] | None) -> None:
        channel, number = self._numbers.pop(op.serial, (None, 0))
        if op.kind == "recv" and channel is not None:
            self._know(channel.peer, channel.keys["send"], number)
            if self._clock:
                self._clock[op.group.rank] += 1
                self._mail.finish(op.group.rank, channel.keys["recv"], number, self._clock[op.group.rank])
        elif op.kind == "recv" and op.peer is None and source_rank is not None:
            self._arrived(op, source_rank)

    def _know(self, source: int, channel: bytes, number: int) -> None:
        """Learn what the sender of a message knew when it sent it."""
        clock = self._mail.clock(source, channel, number)
        if clock is not None and self._clock:
            known = clock[:4 * len(self._clock)]
            if known != self._clock.tobytes():
                self._clock = array("I", map(max, self._clock, array("I", known)))

    def is_received(self, op: Op, by: Op) -> bool:
        """Whether the program may know by the end of the operation `by` that what `op` sends has been received.

        A message tells what its sender knew; of a collective, or of a message from any rank, that is not known.
        """
        channel, number = self._numbers.get(op.serial, (None, 0))
        if channel is None:
            return True
        came_in, its_number = self._numbers.get(by.serial, (None, 0))
        if by.kind == "recv" and came_in is not None:
            self._know(came_in.peer, came_in.keys["send"], its_number)
        time_received = self._mail.finished(channel.peer, channel.keys["recv"], number)
        is_known = by.is_message and by.peer is not None
        return 0 < time_received and (not is_known or time_received <= self._clock[channel.peer])

    def _arrived(self, op: Op, source_rank: Callable[[], int]) -> None:
        """Compare a message from any source, once that is known, where they are received one after the other."""
        anyone = next((each for each in self._anyones.values() if each.serial == op.serial), None)
        if anyone is None or not anyone.is_sure:
            return
        anyone.is_waiting = False
        source, rank = op.group.ranks[source_rank()], op.group.rank
        number = anyone.counts[source] = anyone.counts.get(source, 0) + 1
        key = _key(op.group, source, rank, f"tag {op.tag}", "send")
        self._know(source, key, number)
        sent = self._mail.read(source, key, number)
        note = _note(op.tensors[0], op.place)
        if sent is not None and not are_alike(sent, note):
            _compare(sent, note, source, rank)

    # All-to-alls

    def _exchange(self, op: Op, tensors: Sequence[torch.Tensor]) -> None:
        group, rank = op.group, op.group.rank
        number = self._exchanges[group] = self._exchanges.get(group, 0) + 1
        received, sent = _parts(op, tensors, len(group.ranks))
        if not len(received) == len(sent) == len(group.ranks):
            return  # torch says why
        for peer, into, out in zip(group.ranks, received, sent):
            self._mail.post(rank, _key(group, rank, peer, "all_to_all", "send"), number, _note(out, op.place))
            self._mail.post(rank, _key(group, peer, rank, "all_to_all", "recv"), number, _note(into, op.place))
        if any(True for peer in group.ranks for ends in ((rank, peer), (peer, rank))
               if self._misfit(group, number, *ends)):
            raise CallMismatch(self._told(op, number))

    def _misfit(self, group: OwnGroup, number: int, source: int, target: int) -> tuple[Sent, Sent] | None:
        """What one rank sends to another in an all-to-all and what that expects, if both are known and differ."""
        sent = self._mail.read(source, _key(group, source, target, "all_to_all", "send"), number)
        received = self._mail.read(target, _key(group, source, target, "all_to_all", "recv"), number)
        if sent is None or received is None or are_alike(sent, received):
            return None
        ends = unpacked(sent), unpacked(received)
        return None if _is_size_alike(*ends) else ends

    def _told(self, op: Op, number: int) -> str:
        """Which ranks' parts differ, once all have called or after `WAIT_S`."""
        group, end_s = op.group, time.monotonic() + WAIT_S
        while time.monotonic() < end_s and not all(
                self._mail.read(rank, _key(group, rank, rank, "all_to_all", "send"), number) for rank in group.ranks):
            time.sleep(0.01)
        lines: list[str] = []
        places: dict[int, Place | None] = {}
        for source in group.ranks:
            for target in group.ranks:
                misfit = self._misfit(group, number, source, target)
                if misfit is not None:
                    lines.append(f"  rank {source} sends {_part(*misfit)} to rank {target}, rank {target} expects "
                                 f"{_part(*reversed(misfit))}")
                    places |= {source: misfit[0].place, target: misfit[1].place}
        if len(lines) > MOST_LINES:
            lines[MOST_LINES:] = ["  ..."]
        at = [f"  rank {rank} calls it at {where.place_of(*place)}" for rank, place in sorted(places.items()) if place]
        what = " (input_split_sizes and output_split_sizes)" if (op.function or "").endswith("single") else ""
        return "\n".join([f"the ranks disagree in {op.function or 'all_to_all'}: what one sends is not what the other "
                          f"expects{what}", *lines, *at[:MOST_LINES]])


class _Anyone:
    """Receives from any source, as long as one follows the other: then the n-th from a rank is its n-th message."""

    def __init__(self) -> None:
        self.counts: dict[int, int] = {}
        self.is_sure, self.is_waiting, self.serial = True, False, 0

    def issued(self, op: Op) -> None:
        self.is_sure = self.is_sure and not self.is_waiting
        self.is_waiting, self.serial = True, op.serial


def _ends(rank: int, peer: int, kind: str) -> tuple[int, int]:
    """The rank that sends and the rank that receives."""
    return (rank, peer) if kind == "send" else (peer, rank)


@functools.lru_cache(1 << 14)
def _key(group: OwnGroup, source: int, target: int, kind: str, side: str) -> bytes:
    """Eight bytes that stand for one side of the messages from a rank to another."""
    text = f"{group.name} {sorted(group.ranks)} {kind}"
    first = zlib.crc32(text.encode()) + 2 * (target if side == "send" else source) + (side == "send")
    rest = hashlib.blake2b(f"{text} {source} {target} {side}".encode(), digest_size=7).digest()
    return bytes([first % 256]) + rest  # of a rank's channels of one kind, no two begin alike


@functools.lru_cache(1024)
def _note(tensor: Described, place: Place | None) -> bytes:
    dtype = str(tensor.dtype).removeprefix("torch.")
    return Sent(dtype, tuple(tensor.shape), tensor.dtype.itemsize, place).packed()


def _parts(op: Op, tensors: Sequence[torch.Tensor], size: int) -> Iterator[list[Described]]:
    """What a rank receives in an all-to-all from each rank, and what it sends to each."""
    half = len(tensors) // 2
    for side, splits in zip((tensors[:half], tensors[half:]), op.splits):
        if op.function == "all_to_all" or half > 1:
            yield [Described(tensor.dtype, tensor.shape) for tensor in side]
            continue
        (tensor,), rows = side, splits or [(*side[0].shape, 1)[0] // size] * size
        yield [Described(tensor.dtype, type(tensor.shape)((num, *tensor.shape[1:]))) for num in rows]


def _is_size_alike(sent: Sent, received: Sent) -> bool:
    return sent.dtype == received.dtype and sent.num_elements == received.num_elements


def _part(own: Sent, other: Sent) -> str:
    """A part of an all-to-all in words: its rows if the rest is as on the other side, else all of it."""
    if own.shape and other.shape and (own.dtype, own.shape[1:]) == (other.dtype, other.shape[1:]):
        return str(own.shape[0])
    return own.words


def _compare(sent_note: bytes, received_note: bytes, source: int, target: int) -> None:
    """Raise `CallMismatch` if a message can't be received as what it was sent as; note one that leaves room."""
    sent, received = unpacked(sent_note), unpacked(received_note)
    if _fit(sent, received):
        return
    lines = [f"  rank {source} sends {sent.words} to rank {target}{_at(sent)}",
             f"  rank {target} receives {received.words} from rank {source}{_at(received)}"]
    if sent.dtype == received.dtype and sent.num_elements < received.num_elements:
        shorter.note(source, target, sent.words, received.words, sent.place, received.place,
                     received.num_elements - sent.num_elements)
        return
    differs = "dtype" if sent.dtype != received.dtype else "number of elements"
    raise CallMismatch("\n".join([f"a message is received as something else than it was sent as: the {differs} must be "
                                  "the same on both sides, and messages arrive in the order of their sends", *lines]))


def _fit(sent: Sent, received: Sent) -> bool:
    if sent.dtype == received.dtype:
        return sent.num_elements == received.num_elements
    dtypes = {sent.dtype, received.dtype}
    return (bool(dtypes & BYTES) or dtypes in PAIRS) and (
        sent.num_elements * sent.itemsize == received.num_elements * received.itemsize)


def _at(side: Sent) -> str:
    return f" at {where.place_of(*side.place)}" if side.place else ""
