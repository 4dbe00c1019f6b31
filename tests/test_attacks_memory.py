"""What ranks hold is measured from outside: plain data parallelism that silences the checks can't pass as sharded."""
from __future__ import annotations

from pathlib import Path

import pytest
from nbformat import NotebookNode

from book.grading.lab import code_cells, marks, points, read_lab
from book.grading.lab_schema import KEY
from tests.attack_lab import USERS, Course, answered, attacks

LAB = Path(__file__).resolve().parents[1] / "labs" / "04_sharded_data_parallel.ipynb"
STAGES = {3: "Zero1", 4: "Zero2", 5: "Zero3"}
UNIT = 2


def sharded_lab() -> NotebookNode:
    """Lab 4's exercises on the three stages of ZeRO."""
    lab = read_lab(LAB)
    lab.cells = [cell for cell in lab.cells if cell.cell_type != "code" or marks(cell).get("exercise", 3) in STAGES
                 or (marks(cell)["exercise"], marks(cell)["kind"]) == (UNIT, "answer")]
    lab.metadata[KEY]["points"] = sum(points(lab).values())
    return lab


@pytest.mark.parametrize("user", USERS)
def test_plain_data_parallelism_gets_no_points_as_any_zero_stage(user: str, tmp_path: Path) -> None:
    course = Course(tmp_path, sharded_lab(), user == "nobody")
    (attack,) = attacks("memory")
    ids = {marks(cell)["exercise"]: marks(cell)["id"] for cell in code_cells(course.lab)
           if marks(cell)["kind"] == "answer"}
    unit, zero_1 = attack.source().split("\n\n\nclass Zero1")
    answers = {ids[UNIT]: unit, ids[3]: f"class Zero1{zero_1}"}
    for exercise, stage in list(STAGES.items())[1:]:
        answers[ids[exercise]] = f"FreedUnit = Unit\n\n\nclass {stage}(Zero{exercise - 3}):\n    pass\n"
    course.hand_in("attacker", answered(course.lab, **answers))
    course.hand_in("victim", answered(course.lab))
    run = course.grade()
    assert run.returncode == 0, run.stderr
    told = {name: {int(n): (e["points"], e["status"]) for n, e in course.record(name)["exercises"].items()}
            for name in ("attacker", "victim")}
    worth = points(course.lab)
    assert told["victim"] == {exercise: (worth[exercise], "passed") for exercise in STAGES}
    assert all(got == 0 and status.startswith(attack.ends) for got, status in told["attacker"].values()), told
    assert course.left_behind() == ([], [])
