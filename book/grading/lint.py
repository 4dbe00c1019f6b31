"""L4: whether a lab is fit to be graded: the marks of its cells, its points, checks whose output can't be guessed."""
from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from nbformat import NotebookNode

from book.grading import lab as labs, lab_schema, simulated, wired, withheld_modules
from book.grading.lab import LabError, code_cells, marks
from book.grading.lab_schema import KEY
from book.grading.ranks import WireRanks
from book.grading.reference import outputs_of
from book.grading.release import HIDDEN
from book.wire.broker import WireError

# Congruent modulo every number up to 16: a check that uses only SEED % 8, for example, has just eight outputs, which a
# learner could hard-code.
SEEDS = (11, 11 + 720720)


def faults(lab: NotebookNode) -> Iterator[str]:
    """What is wrong with a lab as an assignment, one sentence each: first what reading finds, then what a run finds.

    The lab's solutions run with two seeds. A check that prints the same with both could be passed by printing just
    that, so the seeds differ by a number with many divisors.
    """
    found = list(marked_wrongly(lab))
    yield from found
    if found:
        return
    with WireRanks(sandboxed=False) as ranks:
        for exercise in labs.points(lab):
            yield from _solved_wrongly(lab, exercise, ranks)


def _solved_wrongly(lab: NotebookNode, exercise: int, ranks: WireRanks) -> Iterator[str]:
    """What a run of the exercise's own solution shows to be wrong."""
    try:
        first, second = (outputs_of(lab, exercise, seed) for seed in SEEDS)
        for name in first:
            if first[name] == second[name]:
                yield f"check {name} prints the same with other seeds: print a number that depends on all of SEED"
        why = wired.verdict(lab, exercise, None, ranks)
    except (LabError, WireError) as error:
        why = str(error)
    if why:
        yield why if "own solution" in why else f"exercise {exercise}'s own solution does not pass: {why}"


def marked_wrongly(lab: NotebookNode) -> Iterator[str]:
    """What is wrong with the marks of a lab's cells."""
    in_cells = list(lab_schema.faults(lab)) or list(_marked_wrongly(lab))
    yield from in_cells or _unfit_exercises(lab)


def _marked_wrongly(lab: NotebookNode) -> Iterator[str]:
    """What is wrong with the marks of single cells, given that each value is one that its mark may have."""
    seen: set[str] = set()
    for number, cell in enumerate(code_cells(lab)):
        mark = marks(cell)
        where = f"code cell {number} ({mark['id']})"
        if mark["id"] in seen:
            yield f"{where} has an id that another cell has"
        seen.add(mark["id"])
        yield from _of_kind(mark, where, cell.source, cell.metadata.get("tags", []))
    yield from simulated.faults(lab)


def _unfit_exercises(lab: NotebookNode) -> Iterator[str]:
    """What is wrong with how the cells fit together."""
    total = sum(marks(c).get("points", 0) for c in code_cells(lab) if marks(c).get("kind") == "check")
    stated = lab.metadata.get(KEY, {}).get("points")
    if stated != total:
        yield f"the notebook's metadata say {stated} points, but its checks add up to {total}"
    marked = [marks(c) for c in code_cells(lab)]
    answers = {mark.get("exercise") for mark in marked if mark.get("kind") == "answer"}
    checks = {mark.get("exercise") for mark in marked if mark.get("kind") == "check"}
    hidden = {mark.get("exercise") for mark in marked if mark.get("kind") == "check" and mark.get("hidden")}
    for exercise in sorted(answers ^ checks, key=str):
        yield f"exercise {exercise} needs both an answer and a check"
    for exercise in sorted(answers & checks - hidden, key=str):
        yield f"exercise {exercise} needs a hidden check: a learner can write code that passes only the public ones"
    for cell in code_cells(lab):
        for other in marks(cell).get("depends", []):
            if other not in answers or other >= marks(cell)["exercise"]:
                yield f"{marks(cell)['id']} depends on exercise {other}, which does not come before it"
    for module, exercises in lab.metadata.get(KEY, {}).get("open", {}).items():
        if not (withheld_modules.exists(module) and set(exercises) <= answers):
            yield f"the notebook's metadata open {module} to {exercises}: one of these does not exist"


def _of_kind(mark: dict[str, Any], where: str, source: str, tags: Sequence[str]) -> Iterator[str]:
    if mark["kind"] == "check":
        if "points" not in mark:
            yield f"{where} needs points, a whole number"
        elif mark.get("hidden") and mark["points"]:
            yield f"{where} is hidden and has points: only public checks may have points, since students see points"
        if mark.get("hidden") and HIDDEN not in tags:
            yield f"{where} is hidden and needs the tag {HIDDEN}: otherwise the website shows it"
        if mark.get("wire") is not None and mark["wire"] not in wired.WIRED:
            yield f"{where} names the wire {mark['wire']!r}, which is not one of {', '.join(wired.WIRED)}"
    if mark["kind"] == "parameters" and not any(line.startswith("SEED =") for line in source.splitlines()):
        yield f"{where} must set SEED on a line of its own"
    for name in mark.get("own", {}):
        if mark["kind"] != "parameters" or not any(line.startswith(f"{name} =") for line in source.splitlines()):
            yield f"{where} draws {name} for each student: a parameters cell may, which sets it on a line of its own"
