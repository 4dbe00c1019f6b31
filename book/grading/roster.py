"""L4: who is in a course: a CSV of students, as an instructor writes it or as a system exports it; and who was late."""
from __future__ import annotations

import csv
import io
import re
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from math import ceil
from pathlib import Path

from book.grading.exports import when
from book.grading.handed_in import StudentEntry
from book.words import counted

# What columns are called: ours first, then those of Canvas, Moodle, Gradescope, nbgrader and GitHub Classroom.
COLUMNS = {
    "id": ("id", "identifier", "sid", "student id", "student_id", "roster_identifier"),
    "name": ("name", "student", "full name"), "first": ("first name", "first_name"), "last": ("last name", "last_name"),
    "email": ("email", "email address"), "section": ("section", "sections"),
    "login": ("login", "github_username", "sis login id", "username"), "due": ("due",),
    "handed_in": ("handed_in", "submission_timestamp", "last modified (submission)")}
NEVER = ("", "-")  # what systems write for a time that there is none of


class RosterError(ValueError):
    """A roster can't be read; the message says why in one sentence."""


@dataclass(frozen=True)
class Student:
    """A student of the course: what the roster says, None or "" for what it does not; `row` is the whole line."""
    id: str
    name: str
    email: str = ""
    section: str = ""
    login: str = ""
    due: datetime | None = None  # where somebody has longer than the others
    handed_in: datetime | None = None
    row: dict[str, str] = field(default_factory=dict)


def read_roster(path: Path) -> list[Student]:
    """The students in a CSV with a column for the id or the name, and any of: email, section, login, due, handed_in.

    Takes Canvas's and Moodle's own gradebook files and the rosters of Gradescope, nbgrader and GitHub Classroom.
    Raises RosterError for a file without such columns, for an id that appears twice, and for a time that is none.
    """
    try:
        rows = list(csv.DictReader(io.StringIO(path.read_text(encoding="utf-8-sig"))))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise RosterError(f"the roster {path} can't be read: {error}") from None
    called = {column.strip().lower(): column for column in (rows[0] if rows else {}) if column}
    columns = {ours: next((called[name] for name in names if name in called), None) for ours, names in COLUMNS.items()}
    if not any(columns[ours] for ours in ("id", "name", "email", "login")):
        raise RosterError(f"the roster {path} has no student in it, or no column called id, name, email or login")
    students = [_student(row, columns, path) for row in rows if _cell(row, columns["name"]) != "Points Possible"]
    for ours in ("id", "login"):
        given = [getattr(student, ours) for student in students if getattr(student, ours)]
        twice = next((one for one in given if given.count(one) > 1), None)
        if twice is not None:
            raise RosterError(f"the roster {path} has two students with {ours} {twice}")
    return students


def _cell(row: dict[str, str], column: str | None) -> str:
    return (row.get(column) or "").strip() if column else ""


def _student(row: dict[str, str], columns: dict[str, str | None], path: Path) -> Student:
    cells = {ours: _cell(row, column) for ours, column in columns.items()}
    times = {}
    for ours in ("due", "handed_in"):
        times[ours] = when(cells[ours]) if cells[ours] not in NEVER else None
        if times[ours] is None and cells[ours] not in NEVER:
            raise RosterError(f"the roster {path} has a time that can't be read: {cells[ours]}; write 2026-12-01T23:59")
    number = re.sub(r"^Participant\s+(\d+)$", r"\1", cells["id"])  # Moodle's
    name = cells["name"] or f"{cells['first']} {cells['last']}".strip()
    return Student(number, name, cells["email"], cells["section"], cells["login"], row=row, **times)


def placed(entries: Iterable[StudentEntry], students: Sequence[Student]) -> dict[str, Student]:
    """The student behind each entry that the roster knows, by the entry's slug.

    An entry is told by its id, else by its name as an id, a login, an email, the part of an email before the @, or a
    name, whatever its order, case, accents and marks, if only one student has it.
    """
    by_key: dict[str, list[Student]] = {}
    for student in students:
        for key in {student.id, student.login, student.email, student.email.partition("@")[0], *_names(student.name)}:
            if key:
                by_key.setdefault(key.casefold(), []).append(student)
    found = {}
    for entry in entries:
        keys = (entry.id.casefold(), entry.student.casefold(), *_names(entry.student))
        known = next((by_key[key] for key in keys if key and key in by_key), [])
        if len(known) == 1:
            found[entry.slug] = known[0]
    return found


def _names(name: str) -> list[str]:
    """What a name may be called in files: all its letters, beginning with each of its words in turn."""
    plain = "".join(c for c in unicodedata.normalize("NFKD", name).casefold() if not unicodedata.combining(c))
    words = re.findall(r"[^\W_]+", plain)
    return ["name:" + "".join(words[turn:] + words[:turn]) for turn in range(len(words))]


@dataclass(frozen=True)
class Rules:
    """When a lab is due, and what a late one loses: `per_day` percent of its points for each day begun, up to `days`.

    What comes more than `days` days late gets no points; None: it can come at any time.
    """
    due: datetime | None = None
    per_day: float = 0.0
    days: int | None = None

    def lateness(self, handed_in: datetime | None, due: datetime | None = None) -> timedelta | None:
        """How late something was handed in; None if it was not, or if that can't be told."""
        due = due or self.due
        return handed_in - due if due and handed_in and handed_in > due else None

    def share(self, late: timedelta | None) -> float:
        """The share of its points that something so late keeps."""
        if late is None:
            return 1.0
        begun = ceil(late / timedelta(days=1))
        if self.days is not None and begun > self.days:
            return 0.0
        return max(0.0, 1 - self.per_day / 100 * begun)


def in_words(late: timedelta) -> str:
    """How late something is: "2 days, 3 hours", "25 minutes"."""
    minutes = int(late.total_seconds() // 60)
    days, hours = divmod(minutes // 60, 24)
    parts = [counted(number, unit) for number, unit in ((days, "day"), (hours, "hour")) if number]
    return ", ".join(parts) or counted(max(minutes, 1), "minute")
