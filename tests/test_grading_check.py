"""A student's own check and plain nbval reach the same verdict; lint finds checks that could be forged."""
import json
import subprocess
import sys

import nbformat
import pytest
from nbclient import NotebookClient

from book.grading.__main__ import main
from book.grading.grade import Grader, grade
from book.grading.lab import marks
from book.grading.lint import faults
from book.grading.release import released, with_outputs
from tests.attack_lab import BOUNDS, TOTAL, answered, attack_lab
from tests.once import once

pytestmark = pytest.mark.slow

WRONG = "def chunk_bounds(length, num_chunks):\n    return [(0, length)]\n"


@pytest.fixture(scope="module")
def source():
    text = once("attack_lab_with_outputs", lambda: nbformat.writes(with_outputs(attack_lab())))
    return nbformat.reads(text, as_version=4)


@pytest.fixture
def student(source, tmp_path, capsys):
    """A released lab, and a function that fills in answers and returns what both commands find."""
    nbformat.write(source, tmp_path / "source.ipynb")
    assert main(["release", str(tmp_path / "source.ipynb"), "-o", str(tmp_path / "mine")]) == 0
    copy = tmp_path / "mine" / "source.ipynb"

    def verdicts(run_all=False, **answers):
        notebook = answered(released(source), **answers)
        nbformat.write(notebook, copy)
        if run_all:  # as JupyterLab stores it: every cell run, errors and all
            notebook = nbformat.read(copy, as_version=4)
            NotebookClient(notebook, allow_errors=True, resources={"metadata": {"path": copy.parent}}).execute()
            nbformat.write(notebook, copy)
        # book.grading spares pytest a grammar that takes seconds to build.
        plain = subprocess.run([sys.executable, "-m", "pytest", "-p", "book.grading", "--nbval", "-q",
                                "-p", "no:cacheprovider", str(copy)], capture_output=True, text=True, cwd=tmp_path)
        capsys.readouterr()
        ours = main(["check", str(copy)])
        return plain.returncode, ours, "".join(capsys.readouterr())
    return verdicts


def exercise_2_alone():
    """The lab without its first exercise: half as long to run."""
    lab = attack_lab()
    lab.cells = [cell for cell in lab.cells if marks(cell).get("exercise") != 1]
    lab.metadata["lockstep"]["points"] = 1
    return lab


def test_right_answers_pass_both_checks(student):
    plain, ours, told = student(bounds=BOUNDS, sent=TOTAL)
    assert (plain, ours) == (0, 0) and "3 of 3 points" in told


@pytest.mark.full
def test_an_empty_copy_fails_both_checks(student):
    plain, ours, told = student()
    assert plain and ours and "0 of 3 points" in told and "exercise 1: 0 of 2 points: not answered" in told


@pytest.mark.full
@pytest.mark.parametrize("run_all", [False, True])
def test_a_wrong_answer_fails_both_even_when_its_outputs_are_saved(student, run_all):
    plain, ours, told = student(run_all, bounds=WRONG, sent=TOTAL)
    assert plain and ours and "1 of 3 points" in told and "the last chunk's length is" in told


def test_a_missing_expected_file_is_asked_for(tmp_path, capsys):
    nbformat.write(attack_lab(), tmp_path / "alone.ipynb")
    assert main(["check", str(tmp_path / "alone.ipynb")]) == 1
    assert "alone.expected.json is not beside alone.ipynb" in capsys.readouterr().err


def test_grading_is_retried_after_a_grader_error(tmp_path, monkeypatch):
    """Grading fails once; in the end only the grade is left."""
    attempt, faults = Grader.attempt, iter([OSError("gone")])

    def failing(*arguments):
        for fault in faults:
            raise fault
        return attempt(*arguments)

    monkeypatch.setattr(Grader, "attempt", failing)
    (tmp_path / "submissions").mkdir()
    nbformat.write(exercise_2_alone(), tmp_path / "lab.ipynb")
    nbformat.write(answered(exercise_2_alone()), tmp_path / "submissions" / "ada.ipynb")
    (record,) = grade(tmp_path / "lab.ipynb", tmp_path / "submissions", tmp_path / "out", sandboxed=False)
    assert record["points"] == 1 and record["error"] is None and "fault" not in record
    assert json.loads((tmp_path / "out" / "students" / "ada.json").read_text()) == record


@pytest.mark.full
def test_lint_passes_a_lab_whose_checks_depend_on_the_seed(source):
    assert not list(faults(source))


@pytest.mark.full
@pytest.mark.parametrize("printed", ['"ok"', "SEED % 8"])
def test_lint_finds_a_check_that_could_be_forged(printed):
    """It finds nothing else, since the first exercise's checks are fine."""
    lab = attack_lab()
    cell = next(c for c in lab.cells if marks(c).get("id") == "check-2")
    cell.source = f"assert ring_sent(8, 2) == 8\nprint({printed})"
    assert list(faults(lab)) == [
        "check check-2 prints the same with other seeds: print a number that depends on all of SEED"]


def test_lint_finds_a_solution_that_fails():
    lab = exercise_2_alone()
    next(c for c in lab.cells if marks(c).get("id") == "sent").source = TOTAL.replace("2 *", "3 *")
    assert "own solution of exercise 2 does not pass" in " ".join(faults(lab))
