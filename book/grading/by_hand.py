"""L4: questions that an instructor grades by hand: a CSV with points and comments, merged into the totals."""
from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from book.grading.roster import RosterError, Student, read_roster

QUESTION = re.compile(r"(?P<title>.+) \((?P<most>\d+(?:\.\d+)?)\)$")  # "Essay (5)"; "Essay comment" is for the student


def read_by_hand(path: Path) -> list[Student]:
    """The lines of a CSV with a student in each, as in a roster, and a column "TITLE (MOST POINTS)" for each question.

    An empty cell is a question that is not graded yet; a column "TITLE comment" is for the student to read. Raises
    RosterError where there is no question, and for points that are none, negative, or more than there are.
    """
    students = read_roster(path)
    if not any(QUESTION.match(column) for column in students[0].row):
        raise RosterError(f'{path} has no question: a column is called "Essay (5)", with its most points')
    for student in students:
        questions(student, path)
    return students


def questions(student: Student | None, path: Path | None = None) -> list[dict[str, Any]]:
    """A student's questions: title, points (None: not graded yet), max_points, comment."""
    if student is None:
        return []
    found = []
    for column, cell in student.row.items():
        match = QUESTION.match(column or "")
        if match:
            most = _number(match["most"])
            points = _points((cell or "").strip(), most, f"{path}: {student.name or student.id}, {column}")
            comment = (student.row.get(f"{match['title']} comment") or "").strip()
            found.append({"title": match["title"], "points": points, "max_points": most, "comment": comment})
    return found


def not_graded(of_others: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The questions of a student of whom the file has no line, like those of others."""
    return [{**question, "points": None, "comment": ""} for question in of_others]


def _points(cell: str, most: float, where: str) -> float | None:
    if not cell:
        return None
    try:
        points = _number(cell)
    except ValueError:
        raise RosterError(f"{where}: {cell} is no number of points") from None
    if not 0 <= points <= most:
        raise RosterError(f"{where}: {cell} is not from 0 to {most:g} points")
    return points


def _number(text: str) -> float:
    return int(text) if text.isdigit() else float(text)
