"""L2: what the notes of all ranks say is wrong with a run, in a sentence each.

A finding is a function `look(ranks)` that yields a sentence for each thing it finds wrong, and nothing in a run that is
right. It reads facts only, never words. To add one, write it where its notes are taken and name it in `FINDINGS`; a
program with that fault goes into `examples/faults_in_silence.py`.
"""
from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from book.audit import alone, drift, layouts, passed, samples, shorter, threads, touched
from book.audit.notes import Notes
from book.audit.uncaught import threads_that_failed

Look = Callable[[Sequence[Notes | None]], Iterator[str]]  # by rank; None of a rank that could not tell
MOST = 3  # sentences; the first ones explain the rest

FINDINGS: Sequence[Look] = (
    threads_that_failed, alone.look, threads.look, layouts.look, shorter.look, touched.look, passed.look,
    samples.idle_optimizers, drift.look, drift.summed, samples.same_batches, samples.whole_epochs, samples.same_workers,
    samples.other_splits, samples.other_shards, samples.same_orders, samples.same_masks)


def findings(ranks: Sequence[Notes | None]) -> list[str]:
    """Sentences on what is wrong, at most `MOST`, each once."""
    return list(dict.fromkeys(sentence for look in FINDINGS for sentence in look(ranks)))[:MOST]
