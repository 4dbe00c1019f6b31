"""L3: names from code, where a trace comes from, and shares, as the texts of widgets write them."""
from __future__ import annotations

from book.trace import Trace
from book.words import counted

SPELLED = {"all reduce": "all-reduce", "reduce scatter": "reduce-scatter", "all gather": "all-gather",
           "all to all": "all-to-all"}


def spelled(name: str) -> str:
    """A name from code: "ring_all_reduce" is "ring all-reduce"."""
    words = name.replace("_", " ")
    for plain, hyphenated in SPELLED.items():
        words = words.replace(plain, hyphenated)
    return words


def origin(trace: Trace, with_backend: bool) -> str:
    """Where a trace comes from: "recorded from 2 processes"; the backend only if it may differ between machines."""
    if trace.source == "simulated":
        return trace.source
    where = f"{trace.source} from {counted(trace.world_size, 'process')}"
    return f"{where} on {trace.backend}" if with_backend and trace.backend else where


def percent(share: float) -> str:
    """A share as "27.3 %"."""
    return f"{100 * share:.1f} %"
