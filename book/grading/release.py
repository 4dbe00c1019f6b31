"""L4: student copies of labs: the source has the solutions, the exercise is generated from it."""
from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import nbformat
from nbformat import NotebookNode

from book.grading.lab import KEY, KINDS, LabError, marks

FOLDED = "hide-input"  # folds a solution on the website
STUB = ("# YOUR CODE HERE\n"
        "{indent}raise NotImplementedError(\"exercise {exercise}: write this function, then run the cell\")")
_SOLUTION = re.compile(r"^([ \t]*)### BEGIN SOLUTION\n.*?^[ \t]*### END SOLUTION[ \t]*$", re.DOTALL | re.MULTILINE)


def release_all(labs: Iterable[Path], out: Path, force: bool = False) -> Iterator[str]:
    """Writes a student copy of each lab into `out`, yielding a line about each.

    A copy that is already there is kept, with the work in it, unless `force`. Raises LabError for a folder without
    labs or a lab that `released` refuses.
    """
    sources = [path for lab in labs for path in (sorted(lab.glob("*.ipynb")) if lab.is_dir() else [lab])]
    if not sources:
        raise LabError(f"no notebooks in {', '.join(map(str, labs))}")
    for source in sources:
        copy = out / source.name
        if copy.exists() and not force:
            yield f"kept  {copy} (your work; delete or rename it to start over)"
            continue
        notebook = released(nbformat.read(source, as_version=4), source.name)
        out.mkdir(parents=True, exist_ok=True)
        nbformat.write(notebook, copy)
        yield f"wrote {copy}"


def released(lab: NotebookNode, name: str = "this lab") -> NotebookNode:
    """A student copy of `lab`: each solution becomes a stub, outputs are gone, only answers can be edited.

    Raises LabError when a code cell has no mark, an answer has no solution, or a solution stands outside an answer.
    """
    copy = nbformat.from_dict(lab)
    for number, cell in enumerate(copy.cells):
        if cell.cell_type == "code":
            _release_cell(cell, f"{name}, cell {number}")
    return copy


def _release_cell(cell: NotebookNode, where: str) -> None:
    kind = marks(cell).get("kind")
    if kind not in KINDS or not marks(cell).get("id"):
        raise LabError(f"{where}: its metadata need {KEY}.id and {KEY}.kind, one of {', '.join(KINDS)}")
    source, num_solutions = _SOLUTION.subn(lambda m: m[1] + STUB.format(indent=m[1], exercise=marks(cell)["exercise"]),
                                           cell.source)
    if (kind == "answer") != (num_solutions > 0) or "### BEGIN" in source or "### END" in source:
        raise LabError(f"{where}: an answer cell needs ### BEGIN SOLUTION … ### END SOLUTION, and no other cell may "
                       "have them")
    cell.source, cell.outputs, cell.execution_count = source, [], None
    cell.metadata.update({"editable": kind in ("answer", "parameters"), "deletable": False})
    cell.metadata["tags"] = [tag for tag in cell.metadata.get("tags", []) if tag != FOLDED]
