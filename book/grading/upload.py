"""L4: points in the CSV that a course's system imports: its columns, its ids."""
from __future__ import annotations

import csv
import io
from collections.abc import Callable, Sequence

from book.grading.report import Record, no_formula, summary

CANVAS = ("Student", "ID", "SIS User ID", "SIS Login ID", "Section")
MOODLE = ("Identifier", "Full name", "Email address", "Grade", "Maximum grade", "Last modified (grade)",
          "Feedback comments")


def upload_csv(system: str, records: Sequence[Record], column: str) -> str | None:
    """The CSV that `system` imports, with the points in the `column` of that name where it has one for each assignment.

    Of students whom the roster knows, all columns of the roster's line that the system reads are kept. Students who
    handed in nothing keep an empty cell. None for a system that imports no points.
    """
    rows = ROWS.get(system)
    if rows is None:
        return None
    text = io.StringIO()
    csv.writer(text).writerows(rows(records, column))
    return text.getvalue()


def _points(record: Record) -> float | int | str:
    return "" if record.get("missing") else record["points"]


def _of_roster(record: Record, column: str, otherwise: str = "") -> str:
    return record.get("row", {}).get(column) or no_formula(otherwise)


def _canvas(records: Sequence[Record], column: str) -> list[Sequence[object]]:
    """Canvas tells a column by its name, with the assignment's number in parentheses as its own export writes it."""
    rows: list[Sequence[object]] = [(*CANVAS, column)]
    if records:
        rows.append(("    Points Possible", "", "", "", "", records[0]["max_points"]))
    for record in records:
        own = {"Student": record["student"], "ID": record["id"], "Section": record["section"]}
        rows.append((*(_of_roster(record, name, own.get(name, "")) for name in CANVAS), _points(record)))
    return rows


def _moodle(records: Sequence[Record], column: str) -> list[Sequence[object]]:
    """Moodle's grading worksheet has a file for each assignment."""
    rows: list[Sequence[object]] = [MOODLE]
    for record in records:
        rows.append((_of_roster(record, "Identifier", f"Participant {record['id']}"),
                     _of_roster(record, "Full name", record["student"]),
                     _of_roster(record, "Email address", record["email"]), _points(record), record["max_points"],
                     _of_roster(record, "Last modified (grade)", "") or "-", summary(record)))
    return rows


def _classroom(records: Sequence[Record], column: str) -> list[Sequence[object]]:
    rows: list[Sequence[object]] = [("assignment_name", "github_username", "roster_identifier", "points_awarded",
                                     "points_available")]
    rows += [(column, record["login"], record["id"], _points(record), record["max_points"]) for record in records]
    return rows


def _gradescope(records: Sequence[Record], column: str) -> list[Sequence[object]]:
    rows: list[Sequence[object]] = [("Name", "SID", "Email", "Sections", column, "Max Points")]
    rows += [(no_formula(record["student"]), record["id"], record["email"], record["section"], _points(record),
              record["max_points"]) for record in records]
    return rows


ROWS: dict[str, Callable[[Sequence[Record], str], list[Sequence[object]]]] = {
    "canvas": _canvas, "moodle": _moodle, "gradescope": _gradescope, "classroom": _classroom}
