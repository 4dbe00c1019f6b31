"""L0: what each field of a trace's JSON may hold, before anything is made of it: the text may come from anywhere."""
from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import isfinite
from typing import Any, NamedTuple

MAX_RANKS = 1 << 20
MAX_COUNT = 1 << 53  # beyond it not every whole number is a float
MAX_INDEX = 1 << 16  # of a chunk, step, stage or micro-batch; more where there are more events than that


class CellLine(NamedTuple):
    """A line of a notebook's cell: its number, the function that it stands in, and its source, perhaps cut."""
    number: int
    function: str
    source: str

    @classmethod
    def read(cls, value: list[Any] | str) -> CellLine:
        """From a trace's JSON, where older versions have "6 in step: dist.send(x, 1)"."""
        if isinstance(value, str):
            where, _, source = value.partition(": ")
            number, _, function = where.partition(" in ")
            return cls(int(number), function, source)
        return cls(*value)


def checked(head: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> None:
    """Raise ValueError, in words that name the field, for a trace's `head` or events that can't be what was written."""
    for name in ("name", "backend", "hangs"):
        if not isinstance(head.get(name), str | None):
            raise ValueError(f"{name} must be text, not {head[name]!r:.40}")
    if not (head.get("clock_error_s") is None or _is_size(head["clock_error_s"], 0)):
        raise ValueError(f"clock_error_s must be a number of seconds, not {head['clock_error_s']!r:.40}")
    world_size: Any = head.get("world_size")
    if not _is_index(world_size, MAX_RANKS + 1):
        raise ValueError(f"world_size must be a whole number up to {MAX_RANKS}, not {world_size!r:.40}")
    limit = max(MAX_INDEX, len(rows))
    for number, row in enumerate(rows):
        for name, value in row.items():
            fits, what = _FIELDS.get(name, _UNKNOWN)
            if not ((value is None and name not in _NEEDED) or fits(value, limit)):
                raise ValueError(f"event {number} has {name} {value!r:.40}, which must be {what}")
        _check_together(number, row, world_size)


def _check_together(number: int, row: Mapping[str, Any], world_size: int) -> None:
    """Raise ValueError where fields of one event contradict each other."""
    start_s, end_s = row.get("start_s"), row.get("end_s")
    if start_s is not None and end_s is not None and end_s < start_s:
        raise ValueError(f"event {number} ends at {end_s} s, before it starts at {start_s} s")
    contributions = row.get("contributions")
    if row["kind"] in ("send", "recv") and contributions is not None and len(contributions) != world_size:
        raise ValueError(f"event {number} has {len(contributions)} contributions, and there are {world_size} ranks")


def _is_index(value: Any, limit: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < limit


def _is_number(value: Any, limit: int = 0) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e30 and isfinite(value)


def _is_size(value: Any, limit: int) -> bool:
    return _is_number(value) and value >= 0


def _is_text(value: Any, limit: int) -> bool:
    return isinstance(value, str)


def _are_ranks(value: Any, limit: int) -> bool:
    return isinstance(value, list) and len(value) > 0 and all(_is_index(rank, MAX_RANKS) for rank in value)


def _are_numbers(value: Any, limit: int) -> bool:
    return isinstance(value, list) and all(_is_number(one) and abs(one) < MAX_COUNT for one in value)


def _is_line(value: Any, limit: int) -> bool:
    if isinstance(value, str):  # as older versions wrote it
        number, _, rest = value.partition(" in ")
        return number.isdecimal() and ": " in rest
    return isinstance(value, list) and [type(one) for one in value] == [int, str, str] and value[0] >= 0


_NEEDED = ("rank", "kind")
_INDEX = (_is_index, "a whole number of at least 0 and not too large")
_RANK = (lambda value, limit: _is_index(value, MAX_RANKS), "a rank")
_TEXT = (_is_text, "text")
_SECONDS = (_is_number, "a number of seconds")
_UNKNOWN: tuple[Callable[[Any, int], bool], str] = (lambda value, limit: False, "left out: events have no such field")
_FIELDS: dict[str, tuple[Callable[[Any, int], bool], str]] = {
    "rank": _RANK, "kind": _TEXT, "op": _TEXT, "peer": _RANK, "group": (_are_ranks, "a list of ranks"),
    "chunk": _INDEX, "stage": _INDEX, "micro_batch": _INDEX, "step": _INDEX, "bucket": _INDEX, "waited": _INDEX,
    "num_bytes": (_is_size, "a number of bytes"), "start_s": _SECONDS, "end_s": _SECONDS,
    "contributions": (_are_numbers, "a list of numbers"), "unit": _TEXT,
    "line": (_is_line, "the number of a line, its function and its source"),
    "parts": (lambda value, limit: _are_numbers(value, limit) and min(value, default=0) >= 0, "a list of bytes")}
