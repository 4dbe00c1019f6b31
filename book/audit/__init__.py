"""L2: the audit of a run: what each rank notes beside its result, and what the notes of all ranks say is wrong.

A run can end and be wrong: replicas that drift apart, messages that were taken for something else. Ranks note facts
while they run, and exchange nothing for it: whoever started them compares the notes, once, at the end.

    notes      Notes: what one rank has noted, as plain data
    findings   FINDINGS: the sentences that notes lead to, one function each
"""
from __future__ import annotations

from typing import NamedTuple

from book import tap
from book.audit import shorter
from book.audit.findings import findings
from book.audit.layouts import Layouts
from book.audit.notes import Notes, PlaceOf
from book.audit.passed import Passed
from book.audit.threads import Threads
from book.audit.touched import IsReceived, Touches

__all__ = ["Notes", "findings", "notes", "start"]


_following: list[Following] = []  # once this process takes notes


class Following(NamedTuple):
    """What takes notes of this process's calls."""
    threads: Threads
    layouts: Layouts
    touches: Touches
    passed: Passed


def start(is_received: IsReceived | None = None) -> None:
    """Have this process take notes from now on; the tap must be on, and those who refuse calls subscribe afterwards.

    `is_received(op, by)` says whether a program may know at the end of the call `by` that what `op` sends has arrived.
    """
    if not _following:
        _following.append(Following(Threads(), Layouts(), Touches(is_received), Passed()))
        for subscriber in _following[0]:
            tap.subscribe(subscriber)


def notes(place_of: PlaceOf) -> Notes:
    """What this process has noted so far; `place_of(file, line)` makes a place readable."""
    if not _following:
        return Notes()
    own = _following[0]
    return Notes(own.layouts.told(place_of), shorter.told(place_of), own.touches.told(place_of),
                 own.threads.told(place_of), own.passed.told(place_of))
