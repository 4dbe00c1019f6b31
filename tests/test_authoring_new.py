"""New labs and exercises: what is written passes the rules at once, and what can't be written is refused."""
from __future__ import annotations

from pathlib import Path

import pytest

from book.authoring.__main__ import main
from book.grading.__main__ import main as grading
from book.grading.lab import checks, code_cells, job, marks, points, read_lab
from book.grading.lint import marked_wrongly
from book.grading.run import run
from book.grading.reference import PATIENT
from tests.website import ROOT


def told(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> str:
    """What a command that is refused says: one line."""
    assert main([*map(str, arguments)]) == 1
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    return said


@pytest.fixture
def labs(tmp_path: Path) -> Path:
    """A folder with one new lab."""
    assert main(["new-lab", "08_example", "--folder", str(tmp_path / "labs")]) == 0
    return tmp_path / "labs"


def test_a_new_lab_keeps_the_rules_and_has_no_exercise(labs: Path) -> None:
    lab = read_lab(labs / "08_example.ipynb")
    assert main(["lint", str(labs)]) == main(["normalise", "--check", str(labs)]) == 0
    assert not list(marked_wrongly(lab)) and points(lab) == {}
    assert [marks(cell)["kind"] for cell in code_cells(lab)] == ["setup", "parameters"]


@pytest.mark.full
def test_new_exercises_keep_the_rules_and_their_stubs_fail(labs: Path, tmp_path: Path) -> None:
    path = labs / "08_example.ipynb"
    for arguments in (["ring_sum"], ["tree_sum", "--points", "3", "--depends", "1"]):
        assert main(["new-exercise", "08_example", *arguments, "--folder", str(labs)]) == 0
    lab = read_lab(path)
    assert points(lab) == {1: 2, 2: 3} and lab.metadata.lockstep.points == 5
    assert [len(checks(lab, number)) for number in (1, 2)] == [2, 2] and all(
        cell.outputs for number in (1, 2) for cell in checks(lab, number))
    assert [marks(cell)["depends"] for cell in code_cells(lab) if "depends" in marks(cell)] == [[1]]
    assert main(["lint", str(labs)]) == main(["normalise", "--check", str(labs)]) == 0
    assert grading(["lint", str(path)]) == 0
    assert grading(["release", str(path), "-o", str(tmp_path / "copies")]) == 0
    copy = read_lab(tmp_path / "copies" / path.name)
    assert not any(marks(cell).get("hidden") for cell in copy.cells)
    stub = next(cell.source for cell in code_cells(copy) if marks(cell)["id"] == "ring-sum")
    result = run(job(lab, 1, answers={"ring-sum": [stub]}), PATIENT, sandboxed=False)
    failed = next(cell for cell in result.cells if not cell["ok"])
    assert failed["id"] == "check-1"
    assert "This cell needs exercise 1: write its function, then run this cell again." in failed["traceback"]


@pytest.mark.full
def test_an_exercise_is_added_before_the_closing_cells_of_a_lab(tmp_path: Path) -> None:
    path = tmp_path / "01_ranks.ipynb"
    path.write_bytes((ROOT / "labs" / path.name).read_bytes())
    assert main(["new-exercise", "01_ranks", "tree_sum", "--folder", str(tmp_path)]) == 0
    assert main(["lint", str(tmp_path)]) == main(["normalise", "--check", str(tmp_path)]) == 0
    before, after = read_lab(ROOT / "labs" / path.name), read_lab(path)
    assert [cell.source[:8] for cell in after.cells[-6:]] == [
        "## 7. Tr", "def tree", "from boo", "for worl", before.cells[-2].source[:8], before.cells[-1].source[:8]]
    assert after.metadata.lockstep.points == before.metadata.lockstep.points + 2


@pytest.mark.parametrize("arguments, said", [
    (["new-lab", "08_example"], "exists already"),
    (["new-lab", "example"], "two digits"),
    (["new-exercise", "09_other", "ring_sum"], "there is no lab '09_other'"),
    (["new-exercise", "08_example", "Ring sum"], "an exercise's name is its function's"),
    (["new-exercise", "08_example", "lambda"], "an exercise's name is its function's"),
    (["new-exercise", "08_example", "launch"], "uses the name launch already"),
    (["new-exercise", "08_example", "ring_sum", "--points", "two"], "points must be a whole number"),
    (["new-exercise", "08_example", "ring_sum", "--points", "0"], "points must be a whole number"),
    (["new-exercise", "08_example", "ring_sum", "--depends", "x"], "depends must be a whole number"),
    (["new-exercise", "08_example", "ring_sum", "--depends", "1"], "depends can't be [1]"),
])
def test_bad_input_is_refused_and_nothing_is_written(
        arguments: list[str], said: str, labs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = {path.name: path.read_bytes() for path in labs.iterdir()}
    capsys.readouterr()
    assert said in told(capsys, *arguments, "--folder", labs)
    assert before == {path.name: path.read_bytes() for path in labs.iterdir()}


@pytest.mark.parametrize("damage, said", [
    (lambda lab: lab.replace("SEED = 3", "NUMBER = 3"), "must set SEED"),
    (lambda lab: lab.replace("import launch, rank_device", "import launch"), "its setup needs rank_device"),
    (lambda lab: "{", "can't be read as a notebook"),
])
def test_a_lab_that_cannot_take_an_exercise_says_why(
        damage, said: str, labs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = labs / "08_example.ipynb"
    path.write_text(damage(path.read_text(encoding="utf-8")), encoding="utf-8")
    capsys.readouterr()
    assert said in told(capsys, "new-exercise", "08_example", "ring_sum", "--folder", labs)
