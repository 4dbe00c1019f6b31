"""L0: ranks, lists, counts, verbs, bytes and times as the book's sentences write them.

There is one way for each, but for two things: the chunk player's prose joins ranks by "and"
(`widgets.player_words.ranks_named`), and figures write bytes as `plot` does. scene.js writes bytes and times as here.
"""
from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from itertools import groupby
from typing import Any, TypeVar

LONG_RUN = 5  # so many consecutive ranks or more are written as a range
_VERBS = {"has": "have", "is": "are", "does": "do"}
LARGE = {" trillion": 1e12, " billion": 1e9, " million": 1e6}  # from a million on digits are hard to count
BYTES, SECONDS = ("B", "kB", "MB", "GB", "TB"), {"s": 1, "ms": 1e3, "µs": 1e6}
Told = TypeVar("Told", bound=Hashable)
FULL = 0.9995  # from this share of a unit on, a value rounds to all of it and is written in it


def named(ranks: Iterable[int]) -> str:
    """Ranks in words, five or more consecutive ones as a range: "rank 2", "ranks 0, 1, 4-63".

    `widgets.player_words.ranks_named` is for prose about the few ranks of a picture, "ranks 0, 1 and 3".
    """
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


def alike(told: Iterable[tuple[int, Told]]) -> dict[Told, list[int]]:
    """The ranks of which the same is told, by that, in the order in which each first is: sentences name them together.
    """
    found: dict[Told, list[int]] = {}
    for rank, what in told:
        found.setdefault(what, []).append(rank)
    return found


def capitalised(text: str) -> str:
    """A text as a sentence begins; the rest of it stays."""
    return text[:1].upper() + text[1:]


def plural(one: str, count: int) -> str:
    """A noun, of which `one` is the singular, for so many: "thread", "batches"."""
    return one if count == 1 else f"{one}{'es' if one.endswith(('s', 'ch')) else 's'}"


def counted(count: int, one: str) -> str:
    """A count and its noun, of which `one` is the singular: "1 micro-batch", "2 micro-batches", "1,024 ranks"."""
    return f"{count:,} {plural(one, count)}"


def rounded(value: float) -> str:
    """A number to three digits: "2.5", "31,000", "242 million", "2 trillion"."""
    value = float(f"{value:.3g}")
    size, name = next(((size, name) for name, size in LARGE.items() if value >= size), (1.0, ""))
    return f"{value / size:,g}{name}"


def agree(verb: str, who: int | Sequence[Any]) -> str:
    """A verb in the present tense, given as "waits" or "has", for one or for several."""
    num = who if isinstance(who, int) else len(who)
    return verb if num == 1 else _VERBS.get(verb, verb.removesuffix("s"))


def in_bytes(num_bytes: float, zeros: bool = False) -> str:
    """Bytes as "2.3 kB", 1 kB = 1000 B; with `zeros` always three digits, "2.30 kB", as columns need them."""
    power = 0
    while num_bytes >= 1000 * FULL and power < len(BYTES) - 1:
        num_bytes, power = num_bytes / 1000, power + 1
    digits = f"{num_bytes:#.3g}".removesuffix(".") if zeros and power else f"{num_bytes:.3g}"
    return f"{digits} {BYTES[power]}"


def in_seconds(seconds: float, unit: str = "") -> str:
    """A time as "2.3 ms": in s, ms or µs, or in the given `unit`, as tables need it."""
    if not seconds and not unit:
        return "0 s"
    fits = unit or next((name for name, per_s in SECONDS.items() if seconds * per_s >= FULL), "µs")
    return f"{float(f'{seconds * SECONDS[fits]:.3g}'):g} {fits}"
