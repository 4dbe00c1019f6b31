"""L2: tensors that a program has changed while an operation was under way: between `isend` and `wait()`, say.

Torch counts the changes of a tensor, all views of one memory together. So a tensor that is all of its memory has been
changed where the count has; of what was sent from a part of a larger one, some elements are compared besides. A program
that reads a tensor too early leaves no trace, and neither does one that writes through NumPy.
"""
from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import TYPE_CHECKING, NamedTuple

from book.audit.notes import Notes, PlaceOf, noted
from book.tap import Op, Subscriber
from book.tap.log import Place
from book.tap.place import is_learners, is_unseen, outwards

if TYPE_CHECKING:
    import torch

IsReceived = Callable[[Op, Op], bool]
FOLLOWED = {"isend", "irecv", "all_reduce", "broadcast", "reduce"}  # torch does not count what these change
MOST = 10  # lines
SAMPLE = 64  # elements
MOST_PENDING = 1024


class Touched(NamedTuple):
    """A call whose tensor was changed before the line that waited for it."""
    call: str
    peer: int | None
    issued_at: Place | str | None
    waited_at: Place | str | None


class _Pending(NamedTuple):
    """An operation under way: what returns its tensor, the count of that then, some of its elements then."""
    op: Op
    tensor: Callable[[], torch.Tensor | None]
    version: int
    sample: bytes | None  # None if the tensor is all of its memory


class Touches(Subscriber):
    """Notes the tensors that a line of the learner's own waits for, and that have been changed in the meantime."""

    def __init__(self, is_received: IsReceived | None = None) -> None:
        self._is_received = is_received
        self._pending: dict[int, _Pending] = {}
        self._noted: dict[Touched, None] = {}

    def told(self, place_of: PlaceOf) -> tuple[Touched, ...]:
        """What was noted, with readable places."""
        return tuple(each._replace(issued_at=str(place_of(*each.issued_at or ("", 0))),
                                   waited_at=str(place_of(*each.waited_at or ("", 0)))) for each in list(self._noted))

    def issued(self, op: Op, tensors: Sequence[torch.Tensor]) -> None:
        if op.function not in FOLLOWED or len(tensors) != 1 or op.inside:
            return
        tensor = tensors[0]
        if op.place is None or len(self._pending) >= MOST_PENDING:
            return
        try:
            version = tensor._version
            is_whole = tensor.untyped_storage().nbytes() == tensor.nbytes
        except (RuntimeError, NotImplementedError):
            return  # torch counts no changes in inference mode, and a sparse tensor has no memory of its own
        if not is_whole and op.function != "isend":
            return
        # A request that is given up says so, and until then its tensor has to stay; other operations say nothing.
        held = (lambda: tensor) if op.is_message and not tensor.is_cuda else weakref.ref(tensor)
        self._pending[op.serial] = _Pending(op, held, version, None if is_whole else _sample(tensor))

    def withdrawn(self, op: Op) -> None:
        self._pending.pop(op.serial, None)

    def dropped(self, op: Op) -> None:
        self._pending.pop(op.serial, None)

    left = dropped

    def waited(self, op: Op, source_rank: Callable[[], int] | None) -> None:
        pending = self._pending.pop(op.serial, None)
        if pending is not None and _is_changed(pending):
            place = _waits_at(sys._getframe(1))
            if place is not None and len(self._noted) < MOST:
                self._noted[Touched(op.function or "", op.peer, op.place, place)] = None
        if self._pending and op.kind != "send":
            for other in [each for each in list(self._pending.values()) if self._is_over(each, op)]:
                self._pending.pop(other.op.serial, None)

    def _is_over(self, pending: _Pending, by: Op) -> bool:
        """Whether the program may know now that an operation is done, and has not changed its tensor before."""
        is_known = (pending.op.kind == "send" and self._is_received is not None
                    and self._is_received(pending.op, by))
        return is_known and not _is_changed(pending)


def _is_changed(pending: _Pending) -> bool:
    tensor = pending.tensor()
    if tensor is None or tensor._version == pending.version:
        return False
    return pending.sample is None or _sample(tensor) != pending.sample


def _sample(tensor: torch.Tensor) -> bytes:
    """The bytes of some elements, spread over all of a contiguous tensor."""
    import torch
    flat = tensor.detach().reshape(-1)
    some = flat[::max(1, len(flat) // SAMPLE)].contiguous()
    return bytes(some.view(torch.uint8).tolist())


def _waits_at(frame: FrameType) -> Place | None:
    """The learner's line that waits itself; None if a library does: it knows what it may change."""
    # Torch's own functions wait, too, for what the program is not told of.
    seen = next((each for each in outwards(frame) if not is_unseen(each.f_code.co_filename)), None)
    if seen is None or not is_learners(seen.f_code.co_filename):
        return None
    return seen.f_code.co_filename, seen.f_lineno or 0


def look(ranks: Sequence[Notes | None]) -> Iterator[str]:
    """Tensors that were changed while an operation was under way."""
    for each in dict.fromkeys(each for _, each in noted(ranks, "touched")):
        effect = {"isend": "the receiver gets either value", "irecv": "it holds either value"}.get(
            each.call, "the ranks get one value or the other")
        yield (f"the tensor of {each.call} at {each.issued_at} was changed before its wait() at {each.waited_at}: "
               f"{effect}: wait first, or use another tensor")
