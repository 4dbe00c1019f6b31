"""L4: which cell of the lab each cell of a submission is, even if an editor has lost the metadata that say so."""
from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from nbformat import NotebookNode

from book.checks.unwritten import FIRST
from book.grading.lab import marks, with_own, with_seed
from book.grading.lab_schema import KEY
from book.grading.release import without_solutions

_DEFINED = re.compile(r"^(?:async )?(?:def|class) (\w+)", re.MULTILINE)


def recognised(cells: Sequence[Any], own: Mapping[str, NotebookNode]) -> tuple[list[str | None], list[str]]:
    """The id of the lab's cell that each cell of a submission is, None for other cells; and notes on lost metadata.

    `own` are the lab's code cells, by the ids in their metadata. A cell of the lab that no metadata name is found by
    the notebook's own cell id, else by its text, and an answer by the functions and classes that it defines. An answer
    may be in a cell of any type, other cells only in code.
    """
    claimed = [_named(cell) for cell in cells]
    names = [name if name in own and _can_be(cell, own[name]) else None for name, cell in zip(claimed, cells)]
    notes = []
    for way, same in (("cell id", _same_id), ("text", _same_text), ("function names", _same_names)):
        for name in [name for name in own if name not in names]:
            found = [place for place, cell in enumerate(cells)
                     if names[place] is None and _can_be(cell, own[name]) and same(cell, own[name])]
            for place in found:
                names[place] = name
            if found and _is_answer(own[name]):
                notes.append(f"answer cell {name} has lost its metadata, and was found by its {way}")
    notes += [f"answer cell {name} is not a code cell, and was read as one" for name, cell in zip(names, cells)
              if name and cell.get("cell_type") != "code"]
    return names, notes


def source_of(cell: Mapping[str, Any]) -> str:
    """A cell's text, with the line endings that the lab has."""
    source = cell.get("source", "")
    text = "".join(map(str, source)) if isinstance(source, list) else str(source)
    return text.replace("\r\n", "\n").replace("\r", "\n")


def as_in_lab(source: str, own: NotebookNode) -> str:
    """A cell's text without the line that a student copy has before the lab's own."""
    return source.removeprefix(FIRST.get(marks(own)["kind"], ""))


def _named(cell: Any) -> str:
    """The id that a cell's metadata claim, "" if they claim none."""
    metadata = cell.get("metadata") if isinstance(cell, dict) else None
    mark = metadata.get(KEY) if isinstance(metadata, dict) else None
    name = mark.get("id") if isinstance(mark, dict) else None
    return name if isinstance(name, str) else ""


def _can_be(cell: Any, own: NotebookNode) -> bool:
    return isinstance(cell, dict) and (cell.get("cell_type") == "code" or _is_answer(own))


def _is_answer(own: NotebookNode) -> bool:
    return marks(own)["kind"] == "answer"


def _same_id(cell: Mapping[str, Any], own: NotebookNode) -> bool:
    return cell.get("id") == own.get("id", "")


def _same_text(cell: Mapping[str, Any], own: NotebookNode) -> bool:
    return _plain(source_of(cell), own) == _plain(_released(own), own)


def _same_names(cell: Mapping[str, Any], own: NotebookNode) -> bool:
    return _is_answer(own) and not set(_DEFINED.findall(_released(own))).isdisjoint(_DEFINED.findall(source_of(cell)))


def _released(own: NotebookNode) -> str:
    return without_solutions(own.source, marks(own)["exercise"])[0] if _is_answer(own) else own.source


def _plain(source: str, own: NotebookNode) -> str:
    """A source without its seed and its numbers, which do not count: learners try several, or have their own."""
    return with_own(with_seed(as_in_lab(source, own), 0), dict.fromkeys(marks(own).get("own", {}), 0)).strip()
