"""L2: the audit of a run: what each rank notes beside its result, and what the notes of all ranks say is wrong.

A run can end and be wrong: replicas that drift apart, messages that were taken for something else. Ranks note facts
while they run, and exchange nothing for it: whoever started them compares the notes, once, at the end.

    notes      Notes: what one rank has noted, as plain data
    uncaught   errors that have ended threads
    alone      ranks each of which has started a world of its own
    threads    collectives of one group that two threads have called
    layouts    tensors whose elements do not lie in a row
    shorter    messages that were shorter than the tensors that took them
    touched    tensors that were changed while a message of theirs was under way
    passed     results of collectives that a backward uses, and that autograd does not pass
    hooks      where it is seen what a program does with models, optimizers and data
    quiet      what noting may do to a run: take a small share of its time, and never disturb it
    replicas   the copies of models in DDP: their parameters as training goes on, and what may part them
    summed     parameters whose gradients the program sums by itself
    sharded    the same of models in FSDP: copies of one shard, and what must be the same of all
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
from typing import TYPE_CHECKING, Any, NamedTuple

from book import tap
from book.audit import shorter, uncaught
from book.audit.findings import findings
from book.audit.layouts import Layouts
from book.audit.notes import Notes, PlaceOf
from book.audit.passed import Passed
from book.audit.threads import Threads
from book.audit.touched import IsReceived, Touches
from book.tap.replaced import when_stopped

if TYPE_CHECKING:
    from book.audit.replicas import ReplicaNotes
    from book.audit.summed import Sums

__all__ = ["Notes", "compare", "findings", "ignore", "notes", "start"]

class _Following(NamedTuple):
    """What takes notes of this process's calls."""
    threads: Threads
    layouts: Layouts
    touches: Touches
    passed: Passed
    replicas: ReplicaNotes
    sums: Sums


_following: list[_Following] = []  # once this process takes notes


def start(every: int | None = None, is_received: IsReceived | None = None) -> None:
    """Have this process take notes from now on: call it before `dist.init_process_group()`. `launch` does so by itself.

    `tap.stop()` ends this, and `start` may be called again.
    Those who refuse calls subscribe to the tap afterwards.
    All parameters of a model in DDP are digested after steps 1, 2, 4, 8, ..., or after each step that `every` divides.
    `is_received(op, by)` says whether a program may know at the end of the call `by` that what `op` sends has arrived.
    """
    from book.audit import hooks, orphans, reading
    from book.audit.replicas import ReplicaNotes
    from book.audit.summed import Sums
    if not _following:
        for part in (uncaught, shorter, reading, orphans):
            part.forget()  # an earlier run of this process
        tap.start()
        _following.append(_Following(Threads(), Layouts(), Touches(is_received), Passed(), ReplicaNotes(every), Sums()))
        for subscriber in _following[0]:
            tap.subscribe(subscriber)
        hooks.install(_following[0].replicas, _following[0].sums)
        uncaught.start()
        when_stopped(_stop)


def _stop() -> None:
    """Take no further notes."""
    for subscriber in _following.pop():
        tap.unsubscribe(subscriber)


def notes(place_of: PlaceOf) -> Notes:
    """What this process has noted so far; `place_of(file, line)` makes a place readable."""
    if not _following:
        return Notes()
    from book.audit import digests, orphans, reading
    own = _following[0]
    # Where an error ended the run, ranks have stopped at different places: only what they noted before can be compared.
    is_over = threading.current_thread() is threading.main_thread() and sys.exc_info()[0] is None
    return Notes(
        uncaught=uncaught.uncaught(place_of), layouts=own.layouts.told(place_of), shorter=shorter.told(place_of),
        touched=own.touches.told(place_of), threads=own.threads.told(place_of), uses=own.passed.told(place_of),
        replicas=own.replicas.notes(place_of, is_over), orphans=orphans.notes(place_of),
        summed=own.sums.told(place_of) if digests.reached() else (),
        **reading.notes(place_of, digests.reached()))


def ignore(model: Any) -> None:
    """Say nothing of the replicas of this model, in DDP or in FSDP: they are meant to differ."""
    for own in _following:
        own.replicas.ignore(model)


def compare(model: Any, group: Any = None) -> list[str]:
    """Sentences on how the copies of a module differ between the ranks of a group, which all must call this.

    All ranks get the same sentences, none if the copies are equal. In a process that takes notes they say of a model in
    DDP since when and why. `group` is by default that of DDP, or all ranks.
    """
    from book.audit import asked
    return asked.compare(model, group, _following[0].replicas if _following else None)
