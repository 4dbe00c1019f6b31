"""L3: bytes, times and shares as text, with three digits, as widgets' figures have them (controls.js does the same)."""
from __future__ import annotations

BYTES, SECONDS = ("B", "kB", "MB", "GB", "TB"), {"s": 1, "ms": 1e3, "µs": 1e6}
FULL = 0.9995  # of a unit: what rounds to all of it is written in it


def in_bytes(num_bytes: float, zeros: bool = False) -> str:
    """Bytes as "2.3 kB", 1 kB = 1000 B; with `zeros` always three digits, "2.30 kB", as in columns of them."""
    power = 0
    while num_bytes >= 1000 * FULL and power < len(BYTES) - 1:
        num_bytes, power = num_bytes / 1000, power + 1
    digits = f"{num_bytes:#.3g}".removesuffix(".") if zeros and power else f"{num_bytes:.3g}"
    return f"{digits} {BYTES[power]}"


def in_seconds(seconds: float, unit: str = "") -> str:
    """A time as "2.3 ms": in s, ms or µs, or all in one `unit`, as in a table."""
    if not seconds and not unit:
        return "0 s"
    fits = unit or next((name for name, per_s in SECONDS.items() if seconds * per_s >= FULL), "µs")
    return f"{float(f'{seconds * SECONDS[fits]:.3g}'):g} {fits}"


def percent(share: float) -> str:
    """A share as "27.3 %"."""
    return f"{100 * share:.1f} %"
