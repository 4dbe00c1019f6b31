"""L0: ranks, lists, counts and verbs as the book's sentences write them: one way for each."""
from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Any

LONG_RUN = 5  # so many consecutive ranks or more are written as a range
_VERBS = {"has": "have", "is": "are", "does": "do"}


def named(ranks: Iterable[int]) -> str:
    """Ranks in words, five or more consecutive ones as a range: "rank 2", "ranks 0, 1, 4-63"."""
    numbers = [int(rank) for rank in ranks]
    runs = [[rank for _, rank in run] for _, run in groupby(enumerate(numbers), lambda pair: pair[1] - pair[0])]
    parts = [f"{run[0]}-{run[-1]}" if len(run) >= LONG_RUN else listed(run) for run in runs]
    return f"{plural('rank', len(numbers))} {listed(parts)}"


def listed(things: Iterable[Any]) -> str:
    """Ranks, numbers or names, with commas: "1, 2, 3"."""
    return ", ".join(map(str, things))


def joined(things: Iterable[Any]) -> str:
    """Things as a sentence lists them: "1, 2 and 3"; there is at least one."""
    *most, last = map(str, things)
    return f"{listed(most)} and {last}" if most else last


def plural(one: str, count: int) -> str:
    """A noun, of which `one` is the singular, for so many: "thread", "batches"."""
    return one if count == 1 else f"{one}{'es' if one.endswith(('s', 'ch')) else 's'}"


def counted(count: int, one: str) -> str:
    """A count and its noun, of which `one` is the singular: "1 micro-batch", "2 micro-batches"."""
    return f"{count} {plural(one, count)}"


def agree(verb: str, who: int | Sequence[Any]) -> str:
    """A verb in the present tense, given as "waits" or "has", for one or for several."""
    num = who if isinstance(who, int) else len(who)
    return verb if num == 1 else _VERBS.get(verb, verb.removesuffix("s"))
