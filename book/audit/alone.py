"""L2: ranks each of which has started a world of its own, so that none of them hears of another."""
from __future__ import annotations

from collections.abc import Iterator, Sequence

from book.audit.notes import Notes


def look(ranks: Sequence[Notes | None]) -> Iterator[str]:
    """All ranks alone, of several."""
    lines = [notes.alone for notes in ranks if notes is not None and notes.alone]
    if len(ranks) > 1 and len(lines) == len(ranks):
        yield (f"each of the {len(ranks)} ranks has started a world of one, at {lines[0]}: nothing passes between "
               "them. Leave rank= and world_size= out: launch sets them, as torchrun does")
