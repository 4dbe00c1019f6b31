"""L4: a lab as data: what its cells are, which exercise they belong to, and the notebook that grades one exercise."""
from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import nbformat
from nbformat import NotebookNode
from nbformat.v4 import new_code_cell, new_notebook

from book.grading.lab_schema import KEY, faults

SHOWN = ("play-", "panel-", "measure-", "deadlock-")  # id prefixes of setup cells that only show something
SIMULATED = "play-simulated-"  # the prefix of those that show, above an answer, what its run should look like

Answers = Mapping[str, Sequence[str]]  # by the id of the answer cell: the sources that a learner wrote there


class LabError(ValueError):
    """A lab whose cells are not marked up correctly, or that can't be run."""


def read_lab(path: Path) -> NotebookNode:
    """The lab at `path`. Raises LabError if it can't be read as a notebook, or a mark is not what marks are."""
    lab = read_notebook(path)
    fault = next(faults(lab), None)
    if fault:
        raise LabError(f"{path}: {fault}")
    return lab


def read_notebook(path: Path) -> NotebookNode:
    """The notebook at `path`, whatever its marks are. Raises LabError if it can't be read as one."""
    try:
        notebook = nbformat.read(path, as_version=4)
        nbformat.validate(notebook)
    except Exception as error:  # nbformat's conversion lets anything through: KeyError, AssertionError, NameError
        why = str(error).split("\n")[0]
        raise LabError(f"{path} can't be read as a notebook: {type(error).__name__}: {why:.120}") from None
    return notebook


def marks(cell: NotebookNode) -> dict[str, Any]:
    """The lab metadata of a cell; {} if it has none."""
    return cell.metadata.get(KEY, {})


def variant_of(metadata: Any) -> str | None:
    """The variant named in a notebook's metadata, which may be untrusted; None if there is none."""
    found = metadata.get(KEY) if isinstance(metadata, dict) else None
    variant = found.get("variant") if isinstance(found, dict) else None
    return variant if isinstance(variant, str) else None


def code_cells(lab: NotebookNode) -> Iterator[NotebookNode]:
    """The lab's code cells, in order."""
    return (cell for cell in lab.cells if cell.cell_type == "code")


def shown(cell: NotebookNode) -> bool:
    """Whether a setup cell only shows something: a player, a panel, a measurement, a deadlock."""
    return marks(cell).get("kind") == "setup" and marks(cell)["id"].startswith(SHOWN)


def simulated(cell: NotebookNode) -> bool:
    """Whether a cell shows what the run of an exercise should look like, without a run: it stands above the answer."""
    return marks(cell).get("kind") == "setup" and str(marks(cell).get("id")).startswith(SIMULATED)


def checks(lab: NotebookNode, exercise: int, kind: str = "check") -> list[NotebookNode]:
    """The check cells of an exercise, in order; or those of another kind."""
    return [cell for cell in code_cells(lab)
            if marks(cell).get("kind") == kind and marks(cell)["exercise"] == exercise]


def answer_cells(lab: NotebookNode, exercise: int) -> list[NotebookNode]:
    """The cells in which an exercise is to be answered, in order."""
    return checks(lab, exercise, "answer")


def points(lab: NotebookNode) -> dict[int, int]:
    """What each exercise is worth: the sum of its checks' points."""
    numbers = sorted({marks(c)["exercise"] for c in code_cells(lab) if marks(c).get("kind") == "check"})
    return {number: sum(marks(c).get("points", 0) for c in checks(lab, number)) for number in numbers}


def needed(lab: NotebookNode, exercise: int) -> set[int]:
    """The exercises whose answers an exercise runs: itself, those that its `depends` names, and what they need."""
    direct: dict[int, set[int]] = {}
    for cell in code_cells(lab):
        if marks(cell).get("kind") == "answer":
            direct.setdefault(marks(cell)["exercise"], set()).update(marks(cell).get("depends", []))
    found, new = set(), {exercise}
    while new:
        found |= new
        new = set().union(*(direct.get(number, set()) for number in new)) - found
    return found


def job(lab: NotebookNode, exercise: int, seed: int | None = None,
        answers: Answers | None = None, own: Mapping[str, int] | None = None) -> NotebookNode:
    """The notebook that grades one exercise: the lab's setup, the answers that the exercise needs, its checks.

    `answers` None stands for the lab's own solutions; `seed` None keeps the lab's, and so does `own` with the numbers
    that each student has of their own. No cell has outputs. Cells that a learner wrote get the kind "learner".
    """
    wanted, cells = needed(lab, exercise), []
    for cell in code_cells(lab):
        mark = marks(cell)
        if mark["kind"] == "answer" and mark["exercise"] in wanted:
            written = [cell.source] if answers is None else answers.get(mark["id"], [])
            cells += [cell_of(source, {**mark, "kind": "learner"}) for source in written]
        elif mark["kind"] == "check" and mark["exercise"] == exercise:
            cells.append(cell_of(cell.source, mark))
        elif mark["kind"] == "parameters":
            cells.append(cell_of(with_own(with_seed(cell.source, seed), own or {}), mark))
        elif mark["kind"] == "setup" and not shown(cell):
            cells.append(cell_of(cell.source, mark))
    while cells and marks(cells[-1])["kind"] != "check":
        cells.pop()  # setup of later exercises
    return new_notebook(cells=cells, metadata={"kernelspec": {"name": "python3", "display_name": "Python 3"}})


def expect(notebook: NotebookNode, outputs: Mapping[str, Sequence[Mapping[str, Any]]]) -> None:
    """Stores what they must print in a notebook's checks, for nbval to compare with."""
    for cell in notebook.cells:
        if marks(cell).get("kind") == "check":
            cell.outputs = [nbformat.from_dict(dict(out)) for out in outputs[marks(cell)["id"]]]
            cell.execution_count = 1


def with_seed(source: str, seed: int | None) -> str:
    """The source of the parameters cell with another seed; its other lines are kept."""
    if seed is None:
        return source
    return "\n".join(f"SEED = {seed}" if line.startswith("SEED =") else line for line in source.splitlines())


def with_own(source: str, own: Mapping[str, int]) -> str:
    """The source of the parameters cell with a student's own numbers; its other lines are kept."""
    lines = source.splitlines()
    for name, number in own.items():
        lines = [f"{name} = {number}" if line.startswith(f"{name} =") else line for line in lines]
    return "\n".join(lines) if own else source


def own_in(source: str, names: Sequence[str]) -> dict[str, int]:
    """Which of these names a parameters cell sets to a whole number, and to which."""
    found = (re.search(rf"^{name} *= *(\d{{1,18}})\b", source, re.M) for name in names)
    return {name: int(match[1]) for name, match in zip(names, found) if match}


def cell_of(source: str, mark: Mapping[str, Any]) -> NotebookNode:
    """A code cell of a job, with its marks."""
    # JSON allows lone surrogates, but they can't be written to the job's file.
    cell = new_code_cell(source.encode("utf-8", "replace").decode("utf-8"))
    cell.metadata[KEY] = deepcopy(dict(mark))
    return cell
