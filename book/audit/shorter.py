"""L2: messages that are shorter than the tensors they were received into, which gloo takes without a word."""
from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from book.audit.notes import Notes, PlaceOf, noted
from book.tap.log import Place
from book.words import counted

MOST = 10


class Shorter(NamedTuple):
    """A message and its tensor, in words, and how many elements of the tensor it leaves as they were."""
    source: int
    target: int
    sent: str
    received: str
    sent_at: Place | str | None
    received_at: Place | str | None
    num_left: int


_noted: dict[Shorter, None] = {}


def note(*fields: object) -> None:
    """Note a message; the fields are those of `Shorter`."""
    if len(_noted) < MOST:
        _noted[Shorter(*fields)] = None  # type: ignore[arg-type]


def forget() -> None:
    """Forget what has been noted."""
    _noted.clear()


def told(place_of: PlaceOf) -> tuple[Shorter, ...]:
    """What this process has noted, with readable places."""
    return tuple(each._replace(sent_at=_readable(each.sent_at, place_of),
                               received_at=_readable(each.received_at, place_of)) for each in list(_noted))


def _readable(place: Place | str | None, place_of: PlaceOf) -> str:
    return str(place_of(*place)) if isinstance(place, tuple) else "a line of a library"


def look(ranks: Sequence[Notes | None]) -> Iterator[str]:
    """Messages that have not filled the tensor that they were received into; both ends may have noted them."""
    for each in dict.fromkeys(each for _, each in noted(ranks, "shorter")):
        yield (f"rank {each.source} sent {each.sent} to rank {each.target} at {each.sent_at}, which was received "
               f"into {each.received} at {each.received_at}: the last {counted(each.num_left, 'element')} of that "
               "tensor stayed as before, and on GPUs both ranks would wait forever: receive into a tensor of its size")
