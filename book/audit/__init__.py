"""L2: the audit of a run: what each rank notes beside its result, and what the notes of all ranks say is wrong.

A run can end and be wrong: replicas that drift apart, messages that were taken for something else. Ranks note facts
while they run, and exchange nothing for it: whoever started them compares the notes, once, at the end.

    notes      Notes: what one rank has noted, as plain data
    findings   FINDINGS: the sentences that notes lead to, one function each
"""
from __future__ import annotations

from book import tap
from book.audit.findings import findings
from book.audit.layouts import Layouts
from book.audit.notes import Notes, PlaceOf

__all__ = ["Notes", "findings", "notes", "start"]


_layouts: list[Layouts] = []  # those that this process notes, once it does


def start() -> None:
    """Have this process take notes from now on; the tap must be on."""
    if not _layouts:
        _layouts.append(Layouts())
        tap.subscribe(_layouts[0])


def notes(place_of: PlaceOf) -> Notes:
    """What this process has noted so far; `place_of(file, line)` makes a place readable."""
    return Notes(tuple(layout for each in _layouts for layout in each.told(place_of)))
