"""Every lab: its own solutions score full marks in the sandbox, and the copy that is handed out scores nothing."""
from pathlib import Path

import nbformat
import pytest

from book.grading.grade import grade
from book.grading.lab import points, read_lab
from book.grading.release import released

LABS = sorted((Path(__file__).resolve().parents[1] / "labs").glob("*.ipynb"))


@pytest.mark.parametrize("path", LABS, ids=lambda p: p.stem)
def test_the_solutions_score_full_marks_and_the_released_copy_none(path, tmp_path):
    lab, handed_in = read_lab(path), tmp_path / "submissions"
    handed_in.mkdir()
    nbformat.write(lab, handed_in / "solutions.ipynb")
    nbformat.write(released(lab), handed_in / "untouched.ipynb")
    solved, untouched = grade(path, handed_in, tmp_path / "out")
    told = {number: (e["status"], e.get("log", "")[:1500]) for number, e in solved["exercises"].items()}
    assert {int(n): e["points"] for n, e in solved["exercises"].items()} == points(lab), told
    assert untouched["points"] == 0 and not untouched["error"]
    assert untouched["max_points"] == sum(points(lab).values()) == lab.metadata["lockstep"]["points"]
