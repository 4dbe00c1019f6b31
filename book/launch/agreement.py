"""L2: check that the ranks of a group call the same collective before any of its bytes move.

gloo and NCCL do not compare what ranks call. Two ranks that reduce different dtypes silently get garbage, and two that
call different collectives wait forever or fail with an error about the sizes of gloo's messages. Under `launch` each
rank first writes its call on the `board` and compares it with the calls that are already there. So the last rank to
call finds a difference. Where ranks may leave before others come, as the senders of a gather may, the board remembers
their last calls.
"""
from __future__ import annotations

import functools
import time
import zlib
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from book.launch import where
from book.launch.board import NUM_ALIKE, Board, NotedCall
from book.tap import Op, Subscriber
from book.tap.log import OwnGroup
from book.waiting.hang import CollectiveCall, Group
from book.words import agree, alike, named

WAIT_S = 2.0  # for ranks that are on their way to the same call, so that the message can name them all
SIDES = {"broadcast": "src", "scatter": "src", "broadcast_object_list": "src", "scatter_object_list": "src",
         "reduce": "dst", "gather": "dst", "gather_object": "dst"}  # the arguments that name the root

# How calls may differ, in the order in which the differences are looked for.
DIFFERENCES = (
    "they call different collectives, and must make the same calls in the same order",
    "every rank must call new_group for every group, in the same order, members or not",
    "their tensors have different dtypes, or they pass different numbers of tensors",
    "their tensors have different sizes",
    "they reduce with different operations",
    "they name different roots",
)
assert len(DIFFERENCES) == NUM_ALIKE


class CallMismatch(RuntimeError):
    """The ranks of a group call different collectives, or the same one with tensors that do not fit together."""


class Agreement(Subscriber):
    """Has the collectives that this process calls compared on the board, those of DDP and its like too."""

    def __init__(self, board: Board) -> None:
        self._board = board
        self._numbers: dict[Group, int] = defaultdict(int)
        self._peers: dict[OwnGroup, list[int] | None] = {}  # None: this rank is not in that group

    def before(self, op: Op) -> None:
        """Note a call, and raise `CallMismatch` if a peer's call with the same number differs."""
        peers = self._peers_in(op.group) if _is_compared(op) else None
        if peers is None:
            return
        rank, group = op.group.rank, op.group.shared
        self._numbers[group] += 1
        name, owner = op.function or op.kind, op.owner or ""
        # Whose a call from C++ is hangs on the models that this rank alone has, so only that it is one is compared.
        compared = "C++" if op.function is None else owner
        arguments, alike = _described(name, compared, op.tensors, op.has_splits, op.reduces, op.root, op.members)
        by = f"{owner} in backward" if owner and op.in_backward else owner
        call = NotedCall(self._numbers[group], alike, name, arguments, *(op.place or ("", 0)), by)
        self._board.note(rank, group, call)
        for peer in peers:
            if self._board.alike(peer, group, call.number) in (None, call.alike):
                continue
            other = self._board.read(peer, group, call.number)
            if other is not None and not (
                    self._has_refused(peer, group, call) or self._has_refused(rank, group, other)):
                raise CallMismatch(self._told(group, call.number))

    def _peers_in(self, group: OwnGroup) -> list[int] | None:
        """Whose calls in a group can be compared with this rank's."""
        if group not in self._peers:
            ranks = self._board.members(group.shared)
            self._peers[group] = [rank for rank in ranks if rank != group.rank] if group.rank in ranks else None
        return self._peers[group]

    def _has_refused(self, rank: int, group: Group, call: NotedCall) -> bool:
        """Whether torch has refused this call on a rank that has moved on to its next: it will refuse it on all."""
        refused = self._board.refused(rank, group)
        return refused is not None and (refused.number, refused.alike) == (call.number, call.alike)

    def withdrawn(self, op: Op) -> None:
        """Take back the last call noted in a group: it counts as never made."""
        rank, group = op.group.rank, op.group.shared
        if _is_compared(op) and self._peers_in(op.group) is not None:
            self._board.refuse(rank, group, self._numbers[group])
            self._numbers[group] -= 1

    def _told(self, group: Group, number: int) -> str:
        """What each rank of a group calls, once all have called or after `WAIT_S`."""
        end_s = time.monotonic() + WAIT_S
        while True:
            calls = {rank: self._board.read(rank, group, number) for rank in self._board.members(group)}
            if all(calls.values()) or time.monotonic() > end_s:
                return describe({rank: call for rank, call in calls.items() if call})
            time.sleep(0.01)


def _is_compared(op: Op) -> bool:
    return not (op.is_message or op.inside)


@functools.lru_cache(1024)
def _described(name: str, owner: str, tensors: Sequence[Any], has_splits: bool, reduces: str | None, root: int | None,
               members: Sequence[int]) -> tuple[str, tuple[int, ...]]:
    """A call's arguments for a reader, "float32 [4], SUM", and a checksum for each of `DIFFERENCES`."""
    dtypes = " ".join(str(tensor.dtype) for tensor in tensors)
    is_split = has_splits or name == "all_to_all_single"  # then `Messages` compares the parts
    sizes = "" if is_split else " ".join(str(tensor.shape.numel()) for tensor in tensors)
    own = str(list(members)) if name == "new_group" else ""
    words = [_shapes(tensors), reduces, f"{SIDES[name]}={root}" if root is not None else "", own]
    fields = [f"{name} of {owner}", own, dtypes, sizes, reduces or "", "" if root is None else str(root)]
    return ", ".join(filter(None, words)), tuple(zlib.crc32(field.encode()) for field in fields)


def _shapes(tensors: Sequence[Any]) -> str:
    shapes = [f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}" for tensor in tensors]
    if len(shapes) > 1 and len(set(shapes)) == 1:
        return f"{len(shapes)} × {shapes[0]}"
    return ", ".join(shapes[:4] + ["..."] * (len(shapes) > 4))


def describe(calls: dict[int, NotedCall]) -> str:
    """How the ranks' calls differ where they should be the same, and what each rank calls."""
    fields = zip(*(call.alike for call in calls.values()))
    differs = next((difference for difference, values in zip(DIFFERENCES, fields) if len(set(values)) > 1), "")
    made = alike((rank, _made(call).where) for rank, call in sorted(calls.items()))
    lines = [f"the ranks disagree in a collective: {differs}"]
    return "\n".join([*lines, *(f"  {named(ranks)} {agree('calls', ranks)} {words}" for words, ranks in made.items())])


def last_calls(board: Board) -> dict[Group, dict[int, CollectiveCall]]:
    """The last collective on the board that each rank has called in each group."""
    return {group: {rank: _made(call) for rank, call in calls.items()} for group, calls in board.last_calls().items()}


def _made(call: NotedCall) -> CollectiveCall:
    place = str(where.place_of(call.filename, call.line)) if call.filename else ""
    return CollectiveCall(call.number, call.name, call.arguments, call.by, place)
