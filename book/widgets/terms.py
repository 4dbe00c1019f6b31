"""L3: names and counts from code as prose has them."""
from __future__ import annotations

from book.trace import Trace

SPELLED = {"all reduce": "all-reduce", "reduce scatter": "reduce-scatter", "all gather": "all-gather",
           "all to all": "all-to-all"}


def spelled(name: str) -> str:
    """A name from code: "ring_all_reduce" is "ring all-reduce"."""
    words = name.replace("_", " ")
    for plain, hyphenated in SPELLED.items():
        words = words.replace(plain, hyphenated)
    return words


def counted(count: int, one: str) -> str:
    """So many of what `one` of them is called: "1 micro-batch", "2 micro-batches"."""
    return f"{count} {one}" if count == 1 else f"{count} {one}{'es' if one.endswith(('s', 'ch')) else 's'}"


def origin(trace: Trace, with_backend: bool) -> str:
    """Where a trace comes from: "recorded from 2 processes"; the backend only where it may differ between machines."""
    where = f"{trace.source} from {counted(trace.world_size, 'process')}"
    return f"{where} on {trace.backend}" if with_backend and trace.backend else where
