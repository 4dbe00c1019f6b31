"""L2: the audit of a run: what each rank notes beside its result, and what the notes of all ranks say is wrong.

A run can end and be wrong: replicas that drift apart, messages that were taken for something else. Ranks note facts
while they run, and exchange nothing for it: whoever started them compares the notes, once, at the end.

    notes      Notes: what one rank has noted, as plain data
    hooks      where it is seen what a program does with models, optimizers and data
    replicas   the copies of models in DDP: their parameters as training goes on, and what may part them
    reading    the data: batches of loaders, random splits, shards of samplers
    orphans    parameters that an optimizer holds, and no model
    digests    tensors as numbers that are cheap to keep and to compare
    findings   FINDINGS: the sentences that notes lead to, one function each
    drift      sentences on replicas that are not equal at the end, since when and why
    samples    sentences on ranks that read the same data or draw the same masks, and on optimizers without a model
    asked      compare: the same for a program of one's own, and at any time
"""
from __future__ import annotations

import sys
import threading
from typing import Any

from book.audit.findings import findings
from book.audit.notes import Notes, PlaceOf

__all__ = ["Notes", "compare", "findings", "ignore", "notes", "start"]

_replicas: Any = None  # once it has been started


def start(every: int | None = None) -> None:
    """Have this process take notes from now on; the tap must be on.

    All parameters of a model in DDP are digested after steps 1, 2, 4, 8, ..., or after each step that `every` divides.
    """
    global _replicas
    from book.audit import hooks, replicas
    from book.tap import subscribe
    if _replicas is None:
        _replicas = replicas.Replicas(every)
        subscribe(_replicas)
        hooks.install(_replicas)


def notes(place_of: PlaceOf) -> Notes:
    """What this process has noted so far; `place_of(file, line)` makes a place readable."""
    if _replicas is None:
        return Notes()
    from book.audit import digests, orphans, reading
    # Where an error ended the run, ranks have stopped at different places: only what they noted before can be compared.
    is_over = threading.current_thread() is threading.main_thread() and sys.exc_info()[0] is None
    replicas = _replicas.notes(place_of, is_over)
    return Notes(replicas, *reading.notes(place_of, digests.reached()), orphans.notes(place_of))


def ignore(model: Any) -> None:
    """Say nothing of the replicas of this model, which DDP has wrapped: they are meant to differ."""
    if _replicas is not None:
        _replicas.ignore(model)


def compare(model: Any, group: Any = None) -> list[str]:
    """Sentences on how the copies of a module differ between the ranks of a group, which all must call this.

    All ranks get the same sentences, none if the copies are equal. In a program that has called `tap.start()` and
    `audit.start()` before it made its process group, they say of a model in DDP since when and why.
    """
    from book.audit import asked
    return asked.compare(model, group, _replicas)
