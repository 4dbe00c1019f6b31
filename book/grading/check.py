"""L4: a student's own check: the answers go into a fresh copy of the lab, and nbval runs every check, unsandboxed."""
from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nbformat import NotebookNode

from book.grading import lab as labs, wired
from book.grading.lab import LabError, marks
from book.grading.ranks import WireRanks
from book.grading.reference import PATIENT
from book.grading.release import EXPECTED
from book.grading.run import run
from book.grading.submission import answered, read_submission
from book.wire.broker import WireError


@dataclass(frozen=True)
class Verdict:
    """The result of checking one exercise: its points, and a message if it failed."""
    exercise: int
    points: int
    max_points: int
    message: str | None


def check(notebook: Path, exercises: list[int] | None = None,
          begins: Callable[[int], None] = lambda exercise: None) -> Iterator[Verdict]:
    """Yields a verdict for each exercise of a student's notebook, or for those named.

    `begins` is called with the number of each exercise before it is run, which takes a while. Raises LabError if there
    is no notebook, no such exercise, or no file next to the notebook that says what the checks must print.
    """
    if not notebook.exists():
        raise LabError(f"there is no notebook {notebook}")
    expected = notebook.with_suffix(EXPECTED)
    if not expected.exists():
        raise LabError(f"{expected.name} is not beside {notebook.name}: it came with the lab, and holds what its "
                       "checks must print. If you renamed the notebook, rename it back")
    lab = labs.read_lab(expected)
    submission = read_submission(notebook, lab)
    unknown = set(exercises or []) - labs.points(lab).keys()
    if unknown:
        raise LabError(f"there is no exercise {min(unknown)}; there are {', '.join(map(str, labs.points(lab)))}")
    outputs = {marks(cell)["id"]: cell.outputs for cell in labs.code_cells(lab) if marks(cell)["kind"] == "check"}
    with WireRanks(sandboxed=False) as ranks:
        for exercise, max_points in labs.points(lab).items():
            if exercises and exercise not in exercises:
                continue
            if answered(lab, exercise, submission):
                begins(exercise)
                yield _verdict(lab, exercise, submission.answers, outputs, ranks)
            else:
                yield Verdict(exercise, 0, max_points, "not answered")


def _verdict(lab: NotebookNode, exercise: int, answers: labs.Answers, outputs: dict[str, Any],
             ranks: WireRanks) -> Verdict:
    job = labs.job(lab, exercise, None, answers)
    labs.expect(job, outputs)
    result = run(job, PATIENT, sandboxed=False)
    passed, cells = result.passed(), labs.checks(lab, exercise)
    points = sum(marks(cell).get("points", 0) for cell in cells if marks(cell)["id"] in passed)
    why = result.first_failure() or _over_the_wire(lab, exercise, answers, ranks)
    return Verdict(exercise, 0 if why and len(passed) == len(cells) else points, labs.points(lab)[exercise], why)


def _over_the_wire(lab: NotebookNode, exercise: int, answers: labs.Answers, ranks: WireRanks) -> str | None:
    try:
        return wired.verdict(lab, exercise, answers, ranks)
    except WireError as error:
        return f"over a wire that only sends and receives: {error}"

