"""L4: what a lab's own solutions do: the outputs that others' are compared with, and whether they can be guessed."""
from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from nbformat import NotebookNode

from book.grading import lab as labs, wired
from book.grading.lab import KINDS, LabError, code_cells, marks
from book.grading.run import Result, run
from book.grading.sandbox import Limits
from book.wire.broker import WireError

PATIENT = Limits(cell_s=300, wall_s=900)
SEEDS = (11, 12)


def outputs_of(lab: NotebookNode, exercise: int, seed: int | None = None) -> dict[str, list[dict[str, Any]]]:
    """What the checks of an exercise print with the lab's own solution, by their ids, run on this machine as it is.

    Raises LabError when the solution does not pass.
    """
    return printed(run(labs.job(lab, exercise, seed), PATIENT, sandboxed=False), exercise)


def printed(result: Result, exercise: int) -> dict[str, list[dict[str, Any]]]:
    """The outputs of a job's checks, by their ids. Raises LabError when a cell of it failed."""
    failed = next((cell for cell in result.cells if not cell["ok"]), None)
    if result.why or failed:
        told = result.why or f"cell {failed['id']}: {failed['message']}\n{failed['traceback']}"
        raise LabError(f"the lab's own solution of exercise {exercise} does not pass: {told}")
    return {cell["id"]: cell["outputs"] for cell in result.cells if cell["kind"] == "check"}


def lint(lab: NotebookNode) -> Iterator[str]:
    """What is wrong with a lab as an assignment, a sentence at a time: first what can be read, then what must be run.

    The lab's solutions run with two seeds. A check that prints the same with both could be forged by printing it.
    """
    found = list(marked_wrongly(lab))
    yield from found
    if found:
        return
    for exercise in labs.points(lab):
        try:
            first, second = (outputs_of(lab, exercise, seed) for seed in SEEDS)
        except LabError as error:
            yield str(error)
            continue
        for name in first:
            if first[name] == second[name]:
                yield f"check {name} prints the same with every seed: print a number that depends on SEED"
        try:
            why = wired.verdict(lab, exercise, None, sandboxed=False)
        except WireError as error:
            why = str(error)
        if why:
            yield f"exercise {exercise}'s own solution does not pass: {why}"


def marked_wrongly(lab: NotebookNode) -> Iterator[str]:
    """What is wrong with the marks of a lab's cells."""
    seen: set[str] = set()
    for number, cell in enumerate(code_cells(lab)):
        mark = marks(cell)
        where = f"code cell {number} ({mark.get('id', 'without id')})"
        if not mark.get("id") or mark.get("kind") not in KINDS:
            yield f"{where} needs an id and a kind, one of {', '.join(KINDS)}"
            continue
        if mark["id"] in seen:
            yield f"{where} has an id that another cell has"
        seen.add(mark["id"])
        yield from _of_kind(mark, where, cell.source)
    answers = {marks(c).get("exercise") for c in code_cells(lab) if marks(c).get("kind") == "answer"}
    checked = {marks(c).get("exercise") for c in code_cells(lab) if marks(c).get("kind") == "check"}
    for exercise in sorted(answers ^ checked, key=str):
        yield f"exercise {exercise} needs both an answer and a check"
    total = sum(marks(c).get("points", 0) for c in code_cells(lab) if marks(c).get("kind") == "check")
    stated = lab.metadata.get(labs.KEY, {}).get("points")
    if stated != total:
        yield f"the notebook's metadata say {stated} points, and its checks add up to {total}"


def _of_kind(mark: dict[str, Any], where: str, source: str) -> Iterator[str]:
    if mark["kind"] in ("answer", "check") and not isinstance(mark.get("exercise"), int):
        yield f"{where} needs the number of its exercise"
    if mark["kind"] == "check":
        if not isinstance(mark.get("points"), int) or mark["points"] < 0:
            yield f"{where} needs points, a whole number"
        if mark.get("wire") is not None and mark["wire"] not in wired.WIRED:
            yield f"{where} names the wire {mark['wire']!r}, which is none of {', '.join(wired.WIRED)}"
    if mark["kind"] == "parameters" and not any(line.startswith("SEED =") for line in source.splitlines()):
        yield f"{where} must set SEED in a line of its own"
