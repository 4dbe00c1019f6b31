"""L3: names, counts, bytes and times as texts write them; scene.js writes bytes and times the same way."""
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


BYTES, SECONDS = ("B", "kB", "MB", "GB", "TB"), {"s": 1, "ms": 1e3, "µs": 1e6}
FULL = 0.9995  # from this share of a unit on, a value rounds to all of it and is written in it


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


def percent(share: float) -> str:
    """A share as "27.3 %"."""
    return f"{100 * share:.1f} %"
