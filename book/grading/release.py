"""L4: what a student gets: the lab without solutions and hidden checks, what its checks must print, and a README."""
from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

import nbformat
from nbformat import NotebookNode

from book.checks.unwritten import FIRST, INSTALLED
from book.grading.lab import LabError, expect, marks, needed, points, read_lab, variant_of, with_own
from book.grading.lab_schema import KEY, KINDS
from book.words import joined, plural

FOLDED = "hide-input"  # folds a solution on the website
HIDDEN = "remove-cell"  # keeps a hidden check off the website
UNCOMPARED = "nbval-ignore-output"
STUB = ("# YOUR CODE HERE\n"
        "{indent}raise NotImplementedError(\"exercise {exercise}: write this function, then run the cell\")")
EXPECTED = ".expected.json"
_ON_THE_SITE = re.compile(r"To do the lab, run `make lab`[^\n]*\n")
RIGHT = ("Below each check stands what it prints when your answer is right. Run the check, and its own output "
         "takes that place.\n")
_CITED, _SOURCES = re.compile(r"\s*\{cite\}`[^`]*`"), re.compile(r"```\{bibliography\}.*?```", re.DOTALL)
_SOLUTION = re.compile(r"^([ \t]*)### BEGIN SOLUTION\n.*?^[ \t]*### END SOLUTION[ \t]*$", re.DOTALL | re.MULTILINE)


def release_all(labs: Iterable[Path], out: Path, force: bool = False, variant: str | None = None,
                sources_out: Path | None = None, nbgrader: bool = False,
                own: Callable[[NotebookNode, str], Mapping[str, int]] = lambda lab, name: {}) -> Iterator[str]:
    """Writes a student copy of each lab into `out`, with what its checks must print; yields a line about each.

    `own` draws the numbers of the student whose copy it is, for a lab and its name. A variant's own source, which is
    needed for grading, goes into `sources_out`. An existing copy is kept, with the work in it, unless `force` is set.
    The same labs always give the same files, byte for byte. Raises LabError for a folder without labs, or a lab that
    `released` or `in_variant` refuses.
    """
    if sources_out and variant is None:
        raise LabError("without a variant, the lab itself is the source to grade with")
    for source in sources_in(labs):
        copy = out / source.name
        lab = _in_variant(read_lab(source), variant, source.name, sources_out)
        notebook = _with_own(released(lab, source.name, nbgrader), own(lab, source.stem))
        out.mkdir(parents=True, exist_ok=True)
        kept, expected = copy.exists() and not force, copy.with_suffix(EXPECTED)
        if not (kept and expected.exists()):  # the existing file belongs to the copy that is kept
            write_notebook(pristine(notebook), expected)
        if kept:
            yield f"kept  {copy} (your work; delete or rename it to start over)"
            continue
        write_notebook(notebook, copy)
        yield f"wrote {copy}"
    told = {copy.name: read_lab(copy.with_suffix(EXPECTED)) for copy in sorted(out.glob("*.ipynb"))
            if copy.with_suffix(EXPECTED).exists()}  # including those of earlier calls
    (out / "README.md").write_text(readme(told), encoding="utf-8")


def _in_variant(lab: NotebookNode, variant: str | None, name: str, sources_out: Path | None) -> NotebookNode:
    """The lab, or its variant, which is written into `sources_out`."""
    if variant is None:
        return lab
    found = with_outputs(in_variant(lab, variant, name))
    if sources_out:
        sources_out.mkdir(parents=True, exist_ok=True)
        write_notebook(found, sources_out / name)
    return found


def _with_own(copy: NotebookNode, numbers: Mapping[str, int]) -> NotebookNode:
    """The copy with a student's own numbers."""
    for cell in copy.cells:
        if marks(cell).get("kind") == "parameters":
            cell.source = with_own(cell.source, numbers)
    return copy


def sources_in(labs: Iterable[Path]) -> list[Path]:
    """The notebooks given as files, and those in given folders. Raises LabError if there are none."""
    sources = [path for lab in labs for path in (sorted(lab.glob("*.ipynb")) if lab.is_dir() else [lab])]
    if not sources:
        raise LabError(f"no notebooks in {', '.join(map(str, labs))}")
    return sources


def released(lab: NotebookNode, name: str = "this lab", nbgrader: bool = False) -> NotebookNode:
    """A student copy of `lab`: solutions become stubs, hidden checks are removed, other checks keep their outputs.

    Only answers and the seed can be edited. What only the website needs is left out: citations, how to get a copy. With
    `nbgrader`, cells carry that tool's metadata too. Raises LabError if a code cell has no mark, an answer has no
    solution, or a solution is outside an answer.
    """
    copy = deepcopy(lab)
    reports = any(INSTALLED in cell.source for cell in copy.cells if cell.cell_type == "code")
    for number, cell in enumerate(copy.cells):
        if cell.cell_type == "code":
            _release_cell(cell, f"{name}, cell {number}", nbgrader)
            if reports:
                cell.source = FIRST.get(marks(cell)["kind"], "") + cell.source
        else:
            without = _CITED.sub("", _ON_THE_SITE.sub(RIGHT, cell.source))
            cell.source = _SOURCES.sub("The sources are listed on the website's page of this lab.", without)
            cell.metadata.pop(KEY, None)
        cell.pop("attachments", None)
    copy.cells = [cell for cell in copy.cells if not marks(cell).get("hidden")]
    marked = copy.metadata.pop(KEY, {})
    if "variant" in marked:
        copy.metadata[KEY] = {"variant": marked["variant"]}
    return copy


def pristine(notebook: NotebookNode) -> NotebookNode:
    """The code cells of a released lab; answers are put into these when a student checks the copy."""
    copy = deepcopy(notebook)
    copy.cells = [cell for cell in copy.cells if cell.cell_type == "code"]
    return copy


def in_variant(lab: NotebookNode, variant: str, name: str = "this lab") -> NotebookNode:
    """The lab with the cells that its metadata define for this variant, and without outputs.

    A cell's `variants` maps a variant's name to the cell's source there, or to a dict of the source and the marks that
    differ. Raises LabError if no cell has the variant.
    """
    copy, found, known = deepcopy(lab), False, set()
    for cell in copy.cells:
        variants = marks(cell).get("variants", {})
        known |= variants.keys()
        if variant in variants:
            found, other = True, variants[variant]
            cell.source = other if isinstance(other, str) else other["source"]
            if not isinstance(other, str):
                cell.metadata[KEY].update({name: mark for name, mark in other.items() if name != "source"})
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    copy.metadata.setdefault(KEY, {})["variant"] = variant
    if not found:
        raise LabError(f"{name} has no variant {variant!r}; it has {', '.join(sorted(known)) or 'none'}")
    return copy


def with_outputs(lab: NotebookNode) -> NotebookNode:
    """The lab with the outputs that its own solutions give in its checks. Raises LabError if one does not pass."""
    from book.grading.reference import outputs_of  # it starts kernels, and the website's environment has none

    copy = deepcopy(lab)
    printed = {name: out for exercise in points(copy) for name, out in outputs_of(copy, exercise).items()}
    expect(copy, printed)
    return copy


def write_notebook(notebook: NotebookNode, path: Path) -> None:
    """Writes a notebook so that equal notebooks give equal bytes."""
    text = json.dumps(json.loads(nbformat.writes(notebook)), indent=1, sort_keys=True, ensure_ascii=False)
    path.write_text(text + "\n", encoding="utf-8")


def without_solutions(source: str, exercise: Any) -> tuple[str, int]:
    """An answer's source with each solution replaced by a stub, and how many there were."""
    return _SOLUTION.subn(lambda m: m[1] + STUB.format(indent=m[1], exercise=exercise), source)


def _release_cell(cell: NotebookNode, where: str, nbgrader: bool) -> None:
    kind = marks(cell).get("kind")
    if kind not in KINDS or not marks(cell).get("id"):
        raise LabError(f"{where}: its metadata need {KEY}.id and {KEY}.kind, one of {', '.join(KINDS)}")
    source, num_solutions = without_solutions(cell.source, marks(cell).get("exercise"))
    if (kind == "answer") != (num_solutions > 0) or "### BEGIN" in source or "### END" in source:
        raise LabError(f"{where}: an answer cell needs ### BEGIN SOLUTION … ### END SOLUTION, and no other cell may "
                       "have them")
    cell.source = source
    tags = [tag for tag in cell.metadata.get("tags", []) if tag not in (FOLDED, UNCOMPARED)]
    if kind == "check":
        cell.execution_count = 0  # it looks as if never run; nbval compares it, which it does not for None
    else:
        cell.outputs, cell.execution_count = [], None
        tags.append(UNCOMPARED)
    cell.metadata.update({"editable": kind in ("answer", "parameters"), "deletable": False, "tags": tags})
    cell.metadata[KEY] = {key: value for key, value in marks(cell).items() if key != "variants"}
    if nbgrader:
        cell.metadata["nbgrader"] = nbgrader_marks(cell)


def nbgrader_marks(cell: NotebookNode) -> dict[str, Any]:
    """The metadata (schema 3) that nbgrader gives such a cell: an answer, a test with points, or a locked cell."""
    kind = marks(cell)["kind"]
    found = {"schema_version": 3, "grade_id": marks(cell)["id"], "grade": kind == "check", "solution": kind == "answer",
             "locked": kind != "answer", "task": False}
    return {**found, "points": marks(cell).get("points", 0)} if kind == "check" else found


def readme(labs: Mapping[str, NotebookNode]) -> str:
    """The student's README for these labs, keyed by file name."""
    listed = "\n".join(_builds_on(name, lab) for name, lab in labs.items())
    first = next(iter(labs))
    return f"""# Labs

1. Open a lab in JupyterLab and read it from the top. Write your code where it says `# YOUR CODE HERE`, run the cell,
   then run the check below it. A check that fails says what is wrong. What stands below a check before you run it is
   what it prints when your answer is right. A chapter that you open beside a lab shows its figures as lists of words
   until you run its cells.
2. Check a whole lab from a terminal, in the book's folder, after `make lab` has installed everything there once. If
   this folder is not the book's `student`, use its path instead:

       .venv/bin/lockstep check student/{first}

   It puts your answers into a fresh copy of the lab and runs every check with nbval. Ordinary
   `.venv/bin/python -m pytest --nbval student/{first}` comes to the same verdict on the checks that you see, as long
   as you leave `SEED` and all cells but your own as they are, and use no name from an exercise that yours does not
   build on.
3. Hand in the notebook. Only your answer cells, and cells that you add beside them, are taken from it. They run with
   another `SEED`, in a place without a network, and with some checks that are not in your copy.

The files `*{EXPECTED}` hold what the checks print when all is right. Leave them beside the notebooks.

## What builds on what

{listed}
"""


def _builds_on(name: str, lab: NotebookNode) -> str:
    """A lab's name and variant, and a line for each of its exercises that runs the answers of others."""
    variant = variant_of(lab.metadata)
    lines = [f"- `{name}`" + (f", variant {variant}" if variant else "")]
    for number in points(lab):
        others = sorted(needed(lab, number) - {number})
        if others:
            lines.append(f"  - exercise {number} also runs your {plural('answer', len(others))} to {joined(others)}")
    if len(lines) == 1:
        lines[0] += ": each exercise stands alone"
    return "\n".join(lines)
