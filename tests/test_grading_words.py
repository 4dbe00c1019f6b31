"""Stubs, notes and tables of grading, on notebooks made for the purpose."""
import csv
import io

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_notebook

from book.grading.lab_schema import KEY
from book.grading.release import released
from book.grading.report import grades_csv
from book.grading.submission import read_submission

STUB = '# YOUR CODE HERE\nraise NotImplementedError("exercise 1: write this function, then run the cell")'


def cell(source, name, kind, **more):
    return new_code_cell(source, metadata={KEY: {"id": name, "kind": kind, "exercise": 1, **more}})


def solution(source):
    return f"### BEGIN SOLUTION\n{source}\n### END SOLUTION"


def test_code_between_two_solutions_belongs_to_the_learner_too():
    lab = new_notebook(cells=[cell(f"{solution('x = 1')}\ny = x\n{solution('z = y')}\nprint(z)", "a", "answer")])
    assert released(lab).cells[0].source == f"{STUB}\ny = x\n{STUB}\nprint(z)"


def test_a_learners_own_cells_belong_to_the_adjacent_answer(tmp_path):
    lab = new_notebook(cells=[cell(solution("x = 1"), "a", "answer"), cell("print(x)", "check-a", "check", points=1),
                              cell(solution("y = 2"), "b", "answer")])
    own = [new_code_cell(source) for source in ("before", "after", "behind the check", "last")]
    answers = [cell("x = 1", "a", "answer"), cell("print(x)", "check-a", "check"), cell("y = 2", "b", "answer")]
    handed_in = new_notebook(cells=[own[0], answers[0], own[1], answers[1], own[2], answers[2], own[3]])
    nbformat.write(handed_in, tmp_path / "ada.ipynb")
    found = read_submission(tmp_path / "ada.ipynb", lab)
    assert found.answers == {"a": ["before", "x = 1", "after"], "b": ["behind the check", "y = 2", "last"]}
    assert found.notes == []


@pytest.mark.parametrize("first", "=+-@|%")
def test_a_students_name_is_never_a_formula(first):
    record = {"student": f"{first}1+1", "error": None, "notes": [], "points": 0, "max_points": 3,
              "exercises": {"1": {"points": 0}}}
    _, row = csv.reader(io.StringIO(grades_csv([record])))
    assert row == [f"'{first}1+1", "0", "0", "3", "", ""]
