"""L4: runs of a lab's own solutions: the outputs that submissions are compared with, and how long they may take."""
from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from nbformat import NotebookNode

from book.grading import lab as labs
from book.grading.lab import LabError
from book.grading.run import Result, run
from book.grading.sandbox import Limits

PATIENT = Limits(cell_s=300, wall_s=900)  # for trusted code whose running time is not known yet
ALLOWANCE_S, TIMES_SLOWER = 60, 4  # how much longer a submission may take than the lab's own solution


@dataclass
class Reference:
    """What the lab's own solution of an exercise printed, by check id, and the limits for submissions.

    `largest_bytes` is the most memory that one of its processes held.
    """
    outputs: dict[str, list[dict[str, Any]]]
    limits: Limits
    largest_bytes: int = 0

    @classmethod
    def read(cls, written: dict[str, Any]) -> Reference:
        """The reference from the dictionary that it was saved as."""
        return cls(written["outputs"], Limits(**written["limits"]), written.get("largest_bytes", 0))

    @classmethod
    def of(cls, result: Result, exercise: int) -> Reference:
        """The reference from a run of the solution. Raises LabError if it did not pass its own checks."""
        outputs = printed(result, exercise)
        slowest = max(cell["seconds"] for cell in result.cells)
        return cls(outputs, Limits(cell_s=ALLOWANCE_S / 2 + TIMES_SLOWER * slowest,
                                   wall_s=ALLOWANCE_S + TIMES_SLOWER * result.wall_s), result.largest_bytes)


def outputs_of(lab: NotebookNode, exercise: int, seed: int | None = None) -> dict[str, list[dict[str, Any]]]:
    """What the checks of an exercise print with the lab's own solution, by check id, run without a sandbox.

    Raises LabError if the solution does not pass.
    """
    return printed(run(labs.job(lab, exercise, seed), PATIENT, sandboxed=False), exercise)


def printed(result: Result, exercise: int) -> dict[str, list[dict[str, Any]]]:
    """The outputs of a job's checks, by check id. Raises LabError if any cell failed."""
    failed = next((cell for cell in result.cells if not cell["ok"]), None)
    told = result.why
    if failed and not told:
        told = f"cell {failed['id']}: {failed['message']}\n{failed['traceback']}"
    if told:
        raise LabError(f"the lab's own solution of exercise {exercise} does not pass: {told}")
    return {cell["id"]: cell["outputs"] for cell in result.cells if cell["kind"] == "check"}
