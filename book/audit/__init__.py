"""L2: the audit of a run: what each rank notes beside its result, and what the notes of all ranks say is wrong.

A run can end and be wrong: replicas that drift apart, messages that were taken for something else. Ranks note facts
while they run, and exchange nothing for it: whoever started them compares the notes, once, at the end.

    notes      Notes: what one rank has noted, as plain data
    findings   FINDINGS: the sentences that notes lead to, one function each
"""
from __future__ import annotations

from book import tap
from book.audit import shorter
from book.audit.findings import findings
from book.audit.layouts import Layouts
from book.audit.notes import Notes, PlaceOf
from book.audit.touched import IsReceived, Touches

__all__ = ["Notes", "findings", "notes", "start"]


_layouts: list[Layouts] = []  # once this process takes notes
_touches: list[Touches] = []


def start(is_received: IsReceived | None = None) -> None:
    """Have this process take notes from now on; the tap must be on.

    `is_received(op, by)` says whether a program may know at the end of the call `by` that what `op` sends has arrived.
    """
    if not _layouts:
        _layouts.append(Layouts())
        _touches.append(Touches(is_received))
        for subscriber in (*_layouts, *_touches):
            tap.subscribe(subscriber)


def notes(place_of: PlaceOf) -> Notes:
    """What this process has noted so far; `place_of(file, line)` makes a place readable."""
    return Notes(tuple(layout for each in _layouts for layout in each.told(place_of)),
                 shorter.told(place_of),
                 tuple(touch for each in _touches for touch in each.told(place_of)))
