"""L4: what each mark in a lab may hold, checked before it is used: an editor, or a slip, may have changed it."""
from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from nbformat import NotebookNode

KEY = "lockstep"  # the key in a cell's metadata that holds its id, kind, exercise and points
KINDS = ("setup", "parameters", "answer", "check")


def faults(lab: NotebookNode) -> Iterator[str]:
    """The faults in a lab's metadata that the book can't have written, in words that name the cell and the mark."""
    yield from _in_marks("the notebook's metadata", lab.metadata.get(KEY, {}), _OF_NOTEBOOK)
    number = 0
    for place, cell in enumerate(lab.cells):
        if cell.cell_type != "code":
            yield from _in_marks(f"cell {place}", cell.metadata.get(KEY, {}), _OF_TEXT)
            continue
        mark = cell.metadata.get(KEY, {})
        where = f"code cell {number} ({mark.get('id', 'without id') if isinstance(mark, Mapping) else 'without id'})"
        yield from _in_marks(where, mark, _OF_CODE) if mark or not isinstance(mark, Mapping) else ()
        yield from _missing(where, mark) if isinstance(mark, Mapping) else ()
        number += 1


def _missing(where: str, mark: Mapping[str, Any]) -> Iterator[str]:
    if not mark.get("id") or "kind" not in mark:
        yield f"{where} needs an id and a kind, one of {', '.join(KINDS)}"
    elif mark["kind"] in ("answer", "check") and "exercise" not in mark:
        yield f"{where} needs the number of its exercise"


def _in_marks(where: str, mark: Any, known: Mapping[str, tuple[Callable[[Any], bool], str]]) -> Iterator[str]:
    """What is wrong with the values in `mark`; for each, `known` has a test and words for what is allowed."""
    if not isinstance(mark, Mapping):
        yield f"{where} has {KEY} {mark!r:.40}, which must be a table of marks"
        return
    for name, value in mark.items():
        fits, what = known.get(name, _UNKNOWN)
        if not fits(value):
            yield f"{where} has {name:.40} {_plain(value)!r:.40}, which must be {what}"


def _plain(value: Any) -> Any:
    """A value without nbformat's own type of dictionary, which prints its name."""
    return dict(value) if isinstance(value, Mapping) else value


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 10 ** 6


def _is_exercise(value: Any) -> bool:
    return _is_whole(value) and value > 0


def _are_exercises(value: Any) -> bool:
    return isinstance(value, list) and all(map(_is_exercise, value))


def _is_memory(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 1 <= value < 10 ** 6


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value)


def _is_wire(value: Any) -> bool:
    return value is None or _is_text(value)  # None in a variant: its check has no wire, though the lab's own has one


def _are_opened(value: Any) -> bool:
    return isinstance(value, Mapping) and all(map(_are_exercises, value.values()))


def _are_ranges(value: Any) -> bool:
    return isinstance(value, Mapping) and all(
        isinstance(among, list) and len(among) == 3 and all(map(_is_positive, among)) and among[0] < among[1]
        for among in value.values())


def _is_positive(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value < 10 ** 12


def _are_variants(value: Any) -> bool:
    return isinstance(value, Mapping) and all(isinstance(other, str) or _is_variant(other) for other in value.values())


def _is_variant(other: Any) -> bool:
    """Whether `other` has a source, and marks that the cell may have."""
    if not isinstance(other, Mapping) or not isinstance(other.get("source"), str) or "variants" in other:
        return False
    return not any(_in_marks("", {name: mark for name, mark in other.items() if name != "source"}, _OF_CODE))


_UNKNOWN: tuple[Callable[[Any], bool], str] = (lambda value: False, "left out: there is no such mark")
_VARIANTS = (_are_variants, "a source, or a source and marks, for each variant")
_POINTS = (_is_whole, "a whole number of at least 0")
_OF_NOTEBOOK = {"points": _POINTS, "variant": (_is_text, "the variant's name"),
                "open": (_are_opened, "a list of exercises for each module")}
_OF_TEXT = {"variants": _VARIANTS}
_OF_CODE = {
    "id": (_is_text, "text"), "kind": (KINDS.__contains__, f"one of {', '.join(KINDS)}"),
    "exercise": (_is_exercise, "a whole number of at least 1"), "points": _POINTS,
    "hidden": (lambda value: isinstance(value, bool), "true or false"),
    "wire": (_is_wire, "the name of a collective, or null"), "depends": (_are_exercises, "a list of exercises"),
    "memory": (_is_memory, "a number of at least 1"),
    "own": (_are_ranges, "the first, the last and the step of each number"),
    "variants": _VARIANTS}
