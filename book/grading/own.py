"""L4: numbers of each student's own: drawn from the id in the roster, for the copy and again when it is graded.

A lab's parameters cell names them in its mark `own`, with the first and the last that each may be, and a step. They
come from an HMAC of the id with the course's secret, a file beside the roster: who has only the roster can't draw them.
"""
from __future__ import annotations

import ast
import hashlib
import hmac
import os
import re
import secrets
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nbformat import NotebookNode

from book.grading.lab import Answers, answer_cells, checks, code_cells, marks, points
from book.grading.roster import RosterError, Student
from book.grading.similar import plain

SUFFIX = ".numbers"  # of the file with the course's secret
Numbers = Mapping[str, int]


@dataclass(frozen=True)
class Owners:
    """The numbers of a course's students, by the names that their entries have for files."""
    drawn: Mapping[str, Numbers] = field(default_factory=dict)
    students: Mapping[str, str] = field(default_factory=dict)  # what they are called

    def whose(self, numbers: Numbers) -> str | None:
        """Who has these numbers; None if nobody has."""
        return next((self.students[slug] for slug, own in self.drawn.items() if own == numbers), None)


NOBODY = Owners()


def ranges(lab: NotebookNode) -> dict[str, range]:
    """What each number of a lab may be; {} if it draws none."""
    return {name: range(first, last + 1, step) for cell in code_cells(lab) if marks(cell).get("kind") == "parameters"
            for name, (first, last, step) in marks(cell).get("own", {}).items()}


def uses_own(lab: NotebookNode, exercise: int) -> bool:
    """Whether the checks of an exercise use such numbers."""
    names = ranges(lab).keys()
    found = {node.id for cell in checks(lab, exercise) for node in ast.walk(ast.parse(cell.source))
             if isinstance(node, ast.Name)} if names else set()
    return not found.isdisjoint(names)


def drawn(lab: NotebookNode, name: str, secret: str, student: Student) -> dict[str, int]:
    """A student's numbers for the lab of this name, the same whenever they are drawn with this secret."""
    return {which: among[_hashed(secret, name, which, student.id or student.name) % len(among)]
            for which, among in ranges(lab).items()}


def _hashed(secret: str, *of: str) -> int:
    return int.from_bytes(hmac.new(secret.encode(), "\0".join(of).encode(), hashlib.sha256).digest(), "big")


def secret_beside(roster: Path, make: bool = False) -> str | None:
    """The secret of the course with this roster; None if there is none, unless it is to `make` one.

    Raises RosterError for a file that holds none.
    """
    path = roster.with_suffix(SUFFIX)
    if not path.exists():
        if not make:
            return None
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(secrets.token_hex(16) + "\n")
    secret = path.read_text().strip()
    if not re.fullmatch(r"[0-9a-f]{32}", secret):
        raise RosterError(f"{path} does not hold a course's secret: put back the file that `release --roster` has made")
    return secret


def owners(lab: NotebookNode, name: str, secret: str | None, students: Mapping[str, Student]) -> Owners:
    """The numbers of students, by the names that their entries have for files; of nobody without a secret."""
    if secret is None or not ranges(lab):
        return NOBODY
    return Owners({slug: drawn(lab, name, secret, student) for slug, student in students.items()},
                  {slug: student.name or student.id for slug, student in students.items()})


def same_answers(lab: NotebookNode, records: Sequence[Mapping[str, Any]], owned: Owners) -> dict[str, list[str]]:
    """Notes for the instructor, by the student's name for files: answers that fail, and fit another's numbers.

    An answer counts as the same whatever its names, comments and layout are.
    """
    found: dict[str, list[str]] = {}
    for exercise in [number for number in points(lab) if owned.drawn and uses_own(lab, number)]:
        part = {record["slug"]: record["exercises"][str(exercise)] for record in records
                if record["slug"] in owned.drawn}
        right = {one["answer"]: slug for slug, one in part.items() if one["points"] and one.get("answer")}
        for slug, one in part.items():
            other = right.get(one.get("answer"))
            if not one["points"] and other and owned.drawn[other] != owned.drawn[slug]:
                found.setdefault(slug, []).append(f"exercise {exercise} has the answer of {owned.students[other]}, "
                                                  "which is right for other numbers")
    return found


def digest(lab: NotebookNode, exercise: int, answers: Answers) -> str:
    """What is the same for answers that differ in names, comments and layout alone.

    "" for one that works the student's numbers out from their names: many are the same, and right for everybody.
    """
    source = "\n".join(part for cell in answer_cells(lab, exercise) for part in answers.get(marks(cell)["id"], []))
    with suppress(SyntaxError, ValueError, RecursionError):
        source = plain(source)
    if any(re.search(rf"\b{name}\b", source) for name in ranges(lab)):
        return ""
    return hashlib.sha256(source.encode("utf-8", "replace")).hexdigest()


def in_words(numbers: Numbers) -> str:
    """Numbers as a sentence writes them: "MY_RANKS = 7 and MY_BYTES = 55440"."""
    return " and ".join(f"{name} = {number}" for name, number in numbers.items())
