"""L4: one assignment of a course: who handed in what and when, and what the reports say of each beside the verdicts."""
from __future__ import annotations

from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path

from book.grading.by_hand import not_graded, questions, read_by_hand
from book.grading.exports import entries
from book.grading.handed_in import StudentEntry, printable, slug
from book.grading.report import Record
from book.grading.roster import Rules, Student, in_words, placed, read_roster


@dataclass
class Course:
    """The entries of an assignment, the students of the roster behind them, and those of whom there is no entry."""
    entries: list[StudentEntry]
    skipped: list[str] = field(default_factory=list)
    known: dict[str, Student] = field(default_factory=dict)  # by the entry's slug
    missing: list[Student] = field(default_factory=list)
    rules: Rules = field(default_factory=Rules)
    has_roster: bool = False
    by_hand: list[Student] = field(default_factory=list)  # the lines of questions that are graded by hand
    asked: dict[str, Student] = field(default_factory=dict)  # of these, by the slug of the entry or missing student

    @classmethod
    def read(cls, system: str, source: Path, lab_name: str, into: Path, roster: Path | None, rules: Rules,
             by_hand: Path | None = None) -> Course:
        """Reads an export and the roster. Raises ExportError and RosterError where one of them can't be read."""
        students = read_roster(roster) if roster else []
        logins = [student.login for student in students if student.login]
        found, skipped = entries(system, source, lab_name, into, logins)
        known = placed(found, students)
        there = {id(student) for student in known.values()}
        missing = [student for student in students if id(student) not in there]
        lines = read_by_hand(by_hand) if by_hand else []
        whole = [_as_in_roster(entry, known.get(entry.slug)) for entry in found] + list(map(_entry_of, missing))
        return cls(found, skipped, known, missing, rules, roster is not None, lines, placed(whole, lines))

    @property
    def students(self) -> dict[str, Student]:
        """The students of the roster, by the names that their entries have for files."""
        return {**self.known, **{_entry_of(student).slug: student for student in self.missing}}

    @property
    def unplaced(self) -> list[str]:
        """The students whose questions were graded by hand, but who are neither in the export nor in the roster."""
        used = {id(line) for line in self.asked.values()}
        return [printable(line.name or line.id or line.login) for line in self.by_hand if id(line) not in used]

    def told(self, entry: StudentEntry, record: Record) -> Record:
        """An entry's record with the student's ids, what lateness costs, and what an instructor should look at."""
        student = self.known.get(entry.slug)
        due, handed_in = self.rules.due, entry.handed_in
        if student:
            due, handed_in = student.due or due, handed_in or student.handed_in
        late = self.rules.lateness(handed_in, due)
        share, asked = self.rules.share(late), self._asked(entry.slug)
        earned = record["points"] + sum(question["points"] or 0 for question in asked)
        points = earned if share == 1 else round(earned * share, 2)
        return record | _ids(student, entry.id) | {
            "student": student.name or record["student"] if student else record["student"], "points": points,
            "max_points": record["max_points"] + sum(question["max_points"] for question in asked),
            "earned": earned, "late": in_words(late) if late else "", "by_hand": asked,
            "notes": record["notes"] + self._notes(entry, student, due, handed_in)}

    def _notes(self, entry: StudentEntry, student: Student | None, due: datetime | None,
               handed_in: datetime | None) -> list[str]:
        notes = [f"older copies were passed over: {', '.join(entry.passed_over)}"] if entry.passed_over else []
        if self.has_roster and student is None:
            notes.append("not in the roster")
        if due and handed_in is None:
            notes.append("when it was handed in is not known" + (", but it was late" if entry.late else ""))
        twice = [other for other, known in self.known.items() if student and known is student and other != entry.slug]
        waiting = [question["title"] for question in self._asked(entry.slug) if question["points"] is None]
        notes += [f"not graded by hand yet: {', '.join(waiting)}"] if waiting else []
        return notes + (["this student handed in more than once"] if twice else [])

    def _asked(self, slug: str) -> list[Record]:
        """The questions of a student that are graded by hand."""
        if not self.by_hand:
            return []
        return questions(self.asked.get(slug)) or not_graded(questions(self.by_hand[0]))

    def records_of_missing(self, max_points: dict[int, int]) -> list[Record]:
        """Records of the students in the roster who handed in nothing."""
        exercises = {str(n): {"points": 0, "max_points": most, "status": "nothing was handed in", "checks": []}
                     for n, most in max_points.items()}
        return [self._record_of_missing(student, exercises) for student in self.missing]

    def _record_of_missing(self, student: Student, exercises: dict[str, Record]) -> Record:
        entry = _entry_of(student)
        asked = self._asked(entry.slug)
        earned = sum(question["points"] or 0 for question in asked)
        most = sum(part["max_points"] for part in [*exercises.values(), *asked])
        return _ids(student, student.id) | {
            "student": entry.student, "slug": entry.slug, "error": "nothing was handed in", "notes": [],
            "exercises": exercises, "points": earned, "earned": earned, "late": "", "max_points": most,
            "by_hand": asked, "missing": not earned}


def _as_in_roster(entry: StudentEntry, student: Student | None) -> StudentEntry:
    """The entry with the student's id and name in the roster, under which other files may know them."""
    if student is None:
        return entry
    return replace(entry, id=student.id or entry.id, student=student.name or entry.student)


def _entry_of(student: Student) -> StudentEntry:
    """A student who handed in nothing, under a name for files that no submission can have."""
    name_for_files = slug(f"{student.name}\0{student.id}")
    return StudentEntry(printable(student.name or student.id), name_for_files, None, id=student.id)


def _ids(student: Student | None, own: str) -> Record:
    if student is None:
        return {"id": own, "email": "", "section": "", "login": own, "row": {}}
    return {"id": student.id or own, "email": student.email, "section": student.section, "login": student.login,
            "row": student.row}

