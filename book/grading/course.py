"""L4: one assignment of a course: who handed in what and when, and what the reports say of each beside the verdicts."""
from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

from book.grading.by_hand import not_graded, questions, read_by_hand
from book.grading.exports import entries
from book.grading.handed_in import Entry, printable, slug
from book.grading.report import Record
from book.grading.roster import Rules, Student, in_words, placed, read_roster


@dataclass
class Course:
    """The entries of an assignment, the students of the roster behind them, and those of whom there is no entry."""
    entries: list[Entry]
    skipped: list[str] = field(default_factory=list)
    known: dict[str, Student] = field(default_factory=dict)  # by the entry's slug
    missing: list[Student] = field(default_factory=list)
    rules: Rules = field(default_factory=Rules)
    has_roster: bool = False
    by_hand: list[Student] = field(default_factory=list)  # the lines of questions that are graded by hand

    @classmethod
    def read(cls, system: str, source: Path, lab_name: str, into: Path, roster: Path | None, rules: Rules,
             by_hand: Path | None = None) -> Course:
        """Reads an export and the roster. Raises ExportError and RosterError where one of them can't be read."""
        students = read_roster(roster) if roster else []
        logins = [student.login for student in students if student.login]
        found, skipped = entries(system, source, lab_name, into, logins)
        known = placed(found, students)
        there = {id(student) for student in known.values()}
        return cls(found, skipped, known, [student for student in students if id(student) not in there], rules,
                   roster is not None, read_by_hand(by_hand) if by_hand else [])

    def told(self, entry: Entry, record: Record) -> Record:
        """An entry's record with the student's ids, what lateness costs, and what an instructor should look at."""
        student = self.known.get(entry.slug)
        due, handed_in = self.rules.due, entry.handed_in
        if student:
            due, handed_in = student.due or due, handed_in or student.handed_in
        late = self.rules.lateness(handed_in, due)
        share, asked = self.rules.share(late), self._asked(entry)
        earned = record["points"] + sum(question["points"] or 0 for question in asked)
        points = earned if share == 1 else round(earned * share, 2)
        return record | _ids(student, entry.id) | {
            "student": student.name or record["student"] if student else record["student"], "points": points,
            "max_points": record["max_points"] + sum(question["max_points"] for question in asked),
            "earned": earned, "late": in_words(late) if late else "", "by_hand": asked,
            "notes": record["notes"] + self._notes(entry, student, due, handed_in)}

    def _notes(self, entry: Entry, student: Student | None, due: datetime | None,
               handed_in: datetime | None) -> list[str]:
        notes = [f"older copies were passed over: {', '.join(entry.passed_over)}"] if entry.passed_over else []
        if self.has_roster and student is None:
            notes.append("not in the roster")
        if due and handed_in is None:
            notes.append("when it was handed in is not known" + (", but it was late" if entry.late else ""))
        twice = [other for other, known in self.known.items() if student and known is student and other != entry.slug]
        waiting = [question["title"] for question in self._asked(entry) if question["points"] is None]
        notes += [f"not graded by hand yet: {', '.join(waiting)}"] if waiting else []
        return notes + (["this student handed in more than once"] if twice else [])

    def _asked(self, entry: Entry) -> list[Record]:
        """The questions of an entry's student that are graded by hand."""
        if not self.by_hand:
            return []
        line = placed([entry], self.by_hand).get(entry.slug)
        return questions(line) or not_graded(questions(self.by_hand[0]))

    def records_of_missing(self, max_points: dict[int, int]) -> list[Record]:
        """Records of the students in the roster who handed in nothing."""
        exercises = {str(n): {"points": 0, "max_points": most, "status": "nothing was handed in", "checks": []}
                     for n, most in max_points.items()}
        asked = questions(self.by_hand[0]) if self.by_hand else []
        return [{"student": printable(student.name or student.id), "slug": slug(f"{student.name} {student.id}"),
                 "error": "nothing was handed in", "notes": [], "exercises": exercises, "points": 0, "earned": 0,
                 "late": "", "max_points": sum(max_points.values()) + sum(q["max_points"] for q in asked),
                 "by_hand": not_graded(asked), "missing": True} | _ids(student, student.id)
                for student in self.missing]


def _ids(student: Student | None, own: str) -> Record:
    if student is None:
        return {"id": own, "email": "", "section": "", "login": own, "row": {}}
    return {"id": student.id or own, "email": student.email, "section": student.section, "login": student.login,
            "row": student.row}

