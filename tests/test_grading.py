"""Student copies: no solution and no output is left, work is never overwritten, a badly marked lab is refused."""
from pathlib import Path

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_notebook

from book.grading.__main__ import main
from book.grading.lab import LabError, marks
from book.grading.release import released

LABS = sorted((Path(__file__).resolve().parents[1] / "labs").glob("*.ipynb"))


def lab(source, **mark):
    cell = new_code_cell(source)
    cell.metadata["lockstep"] = {"id": "a", "kind": "answer", "exercise": 1, **mark}
    return new_notebook(cells=[cell])


@pytest.mark.parametrize("path", LABS, ids=lambda p: p.stem)
def test_a_copy_keeps_every_cell_but_no_solution_and_no_output(path):
    source = nbformat.read(path, as_version=4)
    copy = released(source)
    assert len(copy.cells) == len(source.cells)
    for before, after in zip(source.cells, copy.cells):
        if before.cell_type == "code":
            assert not after.outputs and after.execution_count is None and "SOLUTION" not in after.source
            assert (after.source != before.source) == (marks(before)["kind"] == "answer")
            assert ("raise NotImplementedError" in after.source) == (marks(before)["kind"] == "answer")
            compile(after.source, "cell", "exec")
            assert after.metadata["editable"] == (marks(before)["kind"] in ("answer", "parameters"))
            assert "hide-input" not in after.metadata["tags"]


def test_the_stub_stands_where_the_solution_stood():
    copy = released(lab("def f(x):\n    y = 1\n    ### BEGIN SOLUTION\n    return x + y\n    ### END SOLUTION"))
    assert copy.cells[0].source == (
        "def f(x):\n    y = 1\n    # YOUR CODE HERE\n"
        "    raise NotImplementedError(\"exercise 1: write this function, then run the cell\")")


@pytest.mark.parametrize("notebook", [
    lab("x = 1"), lab("### BEGIN SOLUTION\nx = 1"), lab("x = 1", kind="play"), lab("x = 1", kind="setup", id=""),
    lab("### BEGIN SOLUTION\nx = 1\n### END SOLUTION", kind="check")])
def test_a_badly_marked_lab_is_refused(notebook):
    with pytest.raises(LabError, match="cell 0"):
        released(notebook)


def test_work_is_kept_unless_told_otherwise(tmp_path, capsys):
    assert main(["release", str(LABS[0]), "-o", str(tmp_path)]) == 0
    copy = tmp_path / LABS[0].name
    copy.write_text("my work")
    assert main(["release", str(LABS[0]), "-o", str(tmp_path)]) == 0
    assert copy.read_text() == "my work" and "your work" in capsys.readouterr().out
    assert main(["release", str(LABS[0]), "-o", str(tmp_path), "--force"]) == 0
    assert "NotImplementedError" in copy.read_text()


def test_a_folder_without_labs_is_told(tmp_path, capsys):
    assert main(["release", str(tmp_path), "-o", str(tmp_path / "out")]) == 1
    assert "no notebooks in" in capsys.readouterr().err
