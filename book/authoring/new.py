"""New labs and exercises: the cells, with the metadata that grading reads, around an example to write over."""
from __future__ import annotations

import keyword
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import nbformat
from nbformat import NotebookNode
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

from book.authoring.normalise import normal_text
from book.authoring.notebooks import NotebookError
from book.grading.lab import LabError, code_cells, expect, marks, points, read_lab
from book.grading.lab_schema import KEY
from book.grading.lint import marked_wrongly
from book.grading.reference import outputs_of
from book.grading.release import FOLDED, HIDDEN

TITLE = """# Lab {number}: {words}

Say here what the learner will build, and which chapter explains it.

To do the lab, run `make lab` in the book's folder; it opens a copy of this notebook without the solutions. \
On these pages the solutions are folded."""
SETUP = """import torch
import torch.distributed as dist
from book.checks import unwritten
from book.launch import launch, rank_device

unwritten.install()  # a cell without its answer says so in a line"""
SEED = ("`SEED` decides the numbers that your ranks start with. Change it as you like: every check must pass with any "
        "value, and prints a number that depends on it.")
TASK = """## {number}. {title}

Say here what `{name}(buffer)` gets, and what must hold on every rank when it returns. For now it is an example: it \
leaves in `buffer`, on every rank, the sum of all ranks' buffers."""
ANSWER = '''def {name}(buffer):
    """Sum `buffer` over all ranks, in place."""
    ### BEGIN SOLUTION
    dist.all_reduce(buffer)
    ### END SOLUTION'''
CHECK = """from book.checks import rings


def run_{name}(length):
    device = rank_device()
    dist.init_process_group()
    start = SEED * (dist.get_rank() + 1)
    buffer = torch.arange(start, start + length, device=device).double()
    before = buffer.clone()
    {name}(buffer)
    return before.cpu(), buffer.cpu()


before, after = zip(*launch(run_{name}, 2, 6))
print("sum of the buffer:", rings.all_reduce(before, after))"""
HIDDEN_CHECK = """for world_size, length in ((3, 5), (4, 7)):
    before, after = zip(*launch(run_{name}, world_size, length))
    rings.all_reduce(before, after)
    print(f"{{world_size}} ranks:",
          [sum((i + 1) * int(x) for i, x in enumerate(buffer.tolist()))
           for buffer in after])"""
NEEDED = ("SEED", "dist", "launch", "rank_device", "torch")  # what the example takes from the lab
CLOSING = re.compile(r"## |```\{bibliography\}")  # how a cell begins that comes after the last exercise


def new_lab(name: str, folder: Path) -> Path:
    """Write the lab `folder`/`name`.ipynb without exercises, and return its path.

    Raises NotebookError for a name that is not of the form 16_name, or is taken.
    """
    if not re.fullmatch(r"\d\d_[a-z][a-z0-9_]*", name):
        raise NotebookError(f"a lab's name is two digits, _ and small letters, such as 16_name: not {name!r}.")
    path = folder / f"{name}.ipynb"
    if path.exists():
        raise NotebookError(f"{path} exists already.")
    lab = new_notebook(cells=[new_markdown_cell(TITLE.format(number=int(name[:2]), words=name[3:].replace("_", " "))),
                              _code(SETUP, {"id": "setup", "kind": "setup"}),
                              new_markdown_cell(SEED), _code("SEED = 3", {"id": "seed", "kind": "parameters"})],
                       metadata={KEY: {"points": 0}})
    folder.mkdir(parents=True, exist_ok=True)
    _store(lab, path)
    return path


def new_exercise(lab: str, name: str, worth: str, depends: Sequence[str], folder: Path) -> tuple[Path, int]:
    """Add an exercise that asks for the function `name` to a lab, and return the lab's path and the exercise's number.

    The example's solution runs, and its checks store what it printed. `worth` is the public check's points, `depends`
    the exercises whose answers this one calls. Raises NotebookError for a lab that is missing or marked wrongly,
    a name that can't be a function's or is taken, and a number that is out of range.
    """
    path = folder / f"{lab}.ipynb"
    if not path.exists():
        known = ", ".join(sorted(other.stem for other in folder.glob("*.ipynb"))) or "none"
        raise NotebookError(f"there is no lab {lab!r} in {folder}; there are: {known}.")
    notebook = _read(path)
    _check_name(name, notebook, path)
    num_points = _number(worth, "points")
    earlier = sorted(points(notebook))
    needs = sorted({_number(other, "depends") for other in depends})
    if not set(needs) <= set(earlier):
        raise NotebookError(f"depends can't be {needs}: {path} has the exercises {earlier}.")
    number = max(earlier, default=0) + 1
    cells = _exercise(number, name, num_points, needs)
    place = _place(notebook)
    notebook.cells[place:place] = cells
    notebook.metadata[KEY]["points"] = sum(points(notebook).values())
    try:
        expect(new_notebook(cells=cells), outputs_of(notebook, number))
    except LabError as error:
        raise NotebookError(f"{path}: {error}") from error
    _store(notebook, path)
    return path, number


def _read(path: Path) -> NotebookNode:
    """The lab at `path`, where it has what an exercise needs."""
    try:
        lab = read_lab(path)
    except LabError as error:
        raise NotebookError(str(error)) from error
    fault = next(marked_wrongly(lab), None)
    if fault:
        raise NotebookError(f"{path}: {fault}.")
    given = "\n".join(cell.source for cell in code_cells(lab) if marks(cell)["kind"] in ("setup", "parameters"))
    missing = [name for name in NEEDED if not re.search(rf"\b{name}\b", given)]
    if missing:
        raise NotebookError(f"{path}: its setup needs {', '.join(missing)}, which a new exercise uses.")
    return lab


def _check_name(name: str, lab: NotebookNode, path: Path) -> None:
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name) or keyword.iskeyword(name):
        raise NotebookError(f"an exercise's name is its function's, in small letters, such as ring_step: not {name!r}.")
    if any(re.search(rf"\b(run_)?{name}\b", cell.source) or marks(cell).get("id") == _id(name)
           for cell in code_cells(lab)):
        raise NotebookError(f"{path} uses the name {name} already.")


def _number(text: str, what: str) -> int:
    if not re.fullmatch(r"[1-9][0-9]*", text):
        raise NotebookError(f"{what} must be a whole number of at least 1, not {text!r}.")
    return int(text)


def _exercise(number: int, name: str, num_points: int, depends: list[int]) -> list[NotebookNode]:
    """The cells of an exercise: task, answer, public and hidden check."""
    title = name.replace("_", " ").capitalize()
    answer: dict[str, Any] = {"id": _id(name), "kind": "answer", "exercise": number}
    if depends:
        answer["depends"] = depends
    check = {"id": f"check-{number}", "kind": "check", "exercise": number, "points": num_points}
    hidden = {"id": f"hidden-{number}", "kind": "check", "exercise": number, "points": 0, "hidden": True}
    return [new_markdown_cell(TASK.format(number=number, title=title, name=name)),
            _code(ANSWER.format(name=name), answer, FOLDED), _code(CHECK.format(name=name), check),
            _code(HIDDEN_CHECK.format(name=name), hidden, HIDDEN)]


def _place(lab: NotebookNode) -> int:
    """Where a new exercise goes: before what closes the lab."""
    last = max(number for number, cell in enumerate(lab.cells) if cell.cell_type == "code")
    for number, cell in enumerate(lab.cells[last + 1:], start=last + 1):
        if CLOSING.match(cell.source):
            return number
    return len(lab.cells)


def _code(source: str, mark: dict[str, Any], *tags: str) -> NotebookNode:
    """A code cell that counts as run: it has no output, or gets the one of its check."""
    return new_code_cell(source, execution_count=1, metadata={KEY: mark, "tags": list(tags)})


def _id(name: str) -> str:
    return name.replace("_", "-")


def _store(lab: NotebookNode, path: Path) -> None:
    path.write_text(normal_text(nbformat.writes(lab), path), encoding="utf-8")
