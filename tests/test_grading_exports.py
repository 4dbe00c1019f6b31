"""What courses' systems export is read without a hand's turn; who was late; what the systems import again."""
from __future__ import annotations

import csv
import io
import json
import os
import re
import shutil
import struct
import subprocess
import sys
import zipfile
from datetime import datetime, timedelta, timezone
from pathlib import Path

import nbformat
import pytest
import yaml
from attack_lab import USERS, Course as GradedCourse, answered, attack_lab
from hypothesis import given, settings, strategies as st

from book.grading.__main__ import main
from book.grading.by_hand import read_by_hand
from book.grading.course import Course
from book.grading.exports import MAX_INNER_FILES, ExportError, entries, when
from book.grading.handed_in import slug
from book.grading.lab import code_cells, marks, own_in, points as lab_points, read_lab
from book.grading.own import SUFFIX, drawn, in_words as numbers_in_words, secret_beside
from book.grading.pace import Pace
from book.grading.recognised import recognised
from book.grading.report import BOM, Record, Reports, gradescope, grades_csv, student_page
from book.grading.roster import RosterError, Rules, Student, in_words, read_roster
from book.grading.submission import MAX_BYTES
from book.grading.upload import upload_csv
from tests.website import ROOT

LABS = ROOT / "labs"
LAB = "03_ring.ipynb"
CANVAS = {  # download_submissions.zip: all in one folder, the name that sorts, the user's and the file's numbers
    "lovelaceada_101_9001_03_ring.ipynb": "ada", "hoppergrace_LATE_102_9002_03_ring.ipynb": "grace, old",
    "hoppergrace_LATE_102_9107_03_ring-1.ipynb": "grace", "piresjosé_103_9003_notes.pdf": "%PDF",
    "picardjeanluc_104_9004_work.zip": {"work/03_ring.ipynb": "jean", "__MACOSX/._03_ring.ipynb": "x"}}
MOODLE = {
    "Ada Lovelace_5501_assignsubmission_file/03_ring.ipynb": "ada",
    "Grace Hopper_5502_assignsubmission_file_03_ring.ipynb": "grace",
    "José Pires_5503_assignsubmission_file/notes.pdf": "%PDF",
    "Jean Luc Picard_5504_assignsubmission_file/work.zip": {"03_ring.ipynb": "jean"}}
METADATA = """---
submission_71:
  :submitters:
  - :name: Ada Lovelace
    :sid: '101'
    :email: ada@example.org
  :created_at: 2026-12-01 22:59:30.812345000 Z
  :score: 0.0
  :history: []
submission_72:
  :submitters:
  - :name: Grace Hopper
    :sid: '102'
    :email: grace@example.org
  - :name: Jean Luc Picard
    :sid: '104'
    :email: jean@example.org
  :created_at: 2026-12-02 23:10:00 Z
submission_73:
  :submitters:
  - :name: José Pires
    :sid: '103'
    :email: jose@example.org
  :created_at: 2026-12-01 10:00:00 Z
"""
GRADESCOPE = {"assignment_9_export/submission_metadata.yml": METADATA,
              "assignment_9_export/submission_71/03_ring.ipynb": "ada",
              "assignment_9_export/submission_72/03_ring.ipynb": "grace",
              "assignment_9_export/submission_73/notes.pdf": "%PDF"}
NBGRADER = {"submitted/ada/03_ring/03_ring.ipynb": "ada",
            "submitted/ada/03_ring/timestamp.txt": "2026-12-01 22:59:30 UTC",
            "submitted/grace/03_ring/03_ring.ipynb": "grace",
            "submitted/grace/03_ring/timestamp.txt": "2026-12-02 15:10:00.5 America/Los_Angeles",
            "submitted/jose/03_ring/notes.pdf": "%PDF"}
CLASSROOM = {"ring-submissions/ring-ada/03_ring.ipynb": "ada", "ring-submissions/ring-ada/.git/config": "[core]",
             "ring-submissions/ring-grace-h/labs/03_ring.ipynb": "grace",
             "ring-submissions/ring-jose/notes.pdf": "%PDF"}
EXPORTS = {"canvas": CANVAS, "moodle": MOODLE, "gradescope": GRADESCOPE, "nbgrader": NBGRADER, "classroom": CLASSROOM}


def zipped(files: dict, at: Path) -> Path:
    """A zip of these files; a dict in the place of a content is a zip within it."""
    with zipfile.ZipFile(at, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files.items():
            if isinstance(content, dict):
                inner = io.BytesIO()
                with zipfile.ZipFile(inner, "w") as within:
                    for inside, text in content.items():
                        within.writestr(inside, text)
                content = inner.getvalue()
            archive.writestr(name, content)
    return at


def export(system: str, packed: bool, tmp_path: Path) -> Path:
    """The export of a system, as it comes or unpacked."""
    archive = zipped(EXPORTS[system], tmp_path / "export.zip")
    if packed:
        return archive
    with zipfile.ZipFile(archive) as opened:
        opened.extractall(tmp_path / "export")
    return tmp_path / "export"


def course(system: str, source: Path, tmp_path: Path, roster: str | None = None, rules: Rules | None = None) -> Course:
    if roster is not None:
        (tmp_path / "roster.csv").write_text(roster, encoding="utf-8")
    return Course.read(system, source, LAB, tmp_path / "unpacked", roster and tmp_path / "roster.csv", rules or Rules())


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("system", EXPORTS)
def test_an_export_is_read_as_it_comes(system: str, packed: bool, tmp_path: Path) -> None:
    found, _ = entries(system, export(system, packed, tmp_path), LAB, tmp_path / "unpacked", ["grace-h"])
    read = {entry.path.read_text(): entry for entry in found if entry.path}
    jean = {"canvas": 1, "moodle": 1, "gradescope": 0}.get(system)
    assert set(read) == {"ada", "grace"} | ({"jean"} if jean else set())
    assert [e.error for e in found if e.path is None] == ["no notebook was found"]
    ids = {"canvas": "101", "moodle": "5501", "gradescope": "101"}
    assert read["ada"].id == ids.get(system, "ada")
    if system == "classroom":
        assert read["grace"].id == "grace-h"
    if system in ("gradescope", "nbgrader"):
        times = [read[name].handed_in.replace(microsecond=0) for name in ("ada", "grace")]
        assert times == [datetime(2026, 12, 1, 22, 59, 30, tzinfo=timezone.utc),
                         datetime(2026, 12, 2, 23, 10, tzinfo=timezone.utc)]
    if jean == 0:
        both = [entry.student for entry in found if entry.path and entry.path.read_text() == "grace"]
        assert both == ["Grace Hopper", "Jean Luc Picard"], "one submission of two students"


def test_the_newest_copy_counts_and_the_older_is_named(tmp_path: Path) -> None:
    grace = next(e for e in course("canvas", export("canvas", True, tmp_path), tmp_path).entries if e.id == "102")
    assert grace.path.read_text() == "grace" and grace.passed_over == ("03_ring.ipynb",) and grace.late


def test_another_systems_export_is_refused_in_a_sentence(tmp_path: Path) -> None:
    source = export("moodle", True, tmp_path)
    with pytest.raises(ExportError, match="the names that canvas gives to submissions: is it an export of another"):
        course("canvas", source, tmp_path)
    with pytest.raises(ExportError, match=r"has a file submission_metadata.yml beside the submissions"):
        course("gradescope", source, tmp_path)
    with pytest.raises(ExportError, match=r"there is no system 'blackboard': name one of folder, canvas, moodle"):
        course("blackboard", source, tmp_path)
    (tmp_path / "not.zip").write_text("not one")
    with pytest.raises(ExportError, match=r"not.zip can't be opened as a zip: BadZipFile"):
        course("canvas", tmp_path / "not.zip", tmp_path)


HOSTILE = ["../../../etc/x_1_2_03_ring.ipynb", "/etc/x_1_2_03_ring.ipynb", "..\\..\\x_1_2_03_ring.ipynb",
           "a/\x00/x_1_2_03_ring.ipynb", "C:\\x_1_2_03_ring.ipynb"]


@pytest.mark.parametrize("name", HOSTILE)
def test_no_name_in_an_archive_is_a_path(name: str, tmp_path: Path) -> None:
    into = tmp_path / "deep" / "er" / "unpacked"
    source = zipped({name: "x", "y_2_3_03_ring.ipynb": "y"}, tmp_path / "export.zip")
    found, _ = entries("canvas", source, LAB, into)
    assert found and all(entry.path is None or entry.path.parent == into for entry in found)
    assert {path.name for path in tmp_path.rglob("*") if path.is_file()} == {
        "export.zip", *(path.name for path in into.iterdir())}


def test_a_link_in_an_archive_is_its_text(tmp_path: Path) -> None:
    info = zipfile.ZipInfo("x_1_2_03_ring.ipynb")
    info.external_attr = 0o120777 << 16
    with zipfile.ZipFile(tmp_path / "export.zip", "w") as archive:
        archive.writestr(info, "/etc/passwd")
    (entry,), _ = entries("canvas", tmp_path / "export.zip", LAB, tmp_path / "unpacked")
    assert not entry.path.is_symlink() and entry.path.read_text() == "/etc/passwd"


def test_archives_have_a_largest_size(tmp_path: Path) -> None:
    """What one student handed in costs nobody else: a bomb, too many files, a password, a broken archive."""
    bomb = io.BytesIO()
    with zipfile.ZipFile(bomb, "w", zipfile.ZIP_DEFLATED) as within:
        for number in range(12):
            within.writestr(f"{number}/03_ring.ipynb", bytes(MAX_BYTES - 1))
    locked = bytearray(zipped({"03_ring.ipynb": "x"}, tmp_path / "locked.zip").read_bytes())
    locked[6] |= 1
    central = locked.index(b"PK\x01\x02")
    locked[central + 8] |= 1
    files = {"a_1_1_work.zip": bomb.getvalue(), "b_2_2_work.zip": {f"{n}.txt": "" for n in range(MAX_INNER_FILES + 1)},
             "c_3_3_work.zip": bytes(locked), "d_4_4_work.zip": b"PK\x03\x04" + struct.pack("<20x"),
             "e_5_5_03_ring.ipynb": bytes(MAX_BYTES + 100), "f_6_6_03_ring.ipynb": "f"}
    found, _ = entries("canvas", zipped(files, tmp_path / "export.zip"), LAB, tmp_path / "unpacked")
    by_id = {entry.id: entry for entry in found}
    assert {by_id[n].error for n in "1234"} == {"the archive that was handed in can't be opened, or has no notebook"}
    assert by_id["5"].path.stat().st_size == MAX_BYTES + 1 and by_id["6"].path.read_text() == "f"


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=200), st.integers(0, 2000), st.integers(0, 255))
def test_a_damaged_archive_is_refused_in_a_sentence_or_read(tmp_path_factory: pytest.TempPathFactory, tail: bytes,
                                                            place: int, byte: int) -> None:
    folder = tmp_path_factory.mktemp("damaged")
    whole = bytearray(zipped(CANVAS, folder / "whole.zip").read_bytes())
    whole[place % len(whole)] = byte
    (folder / "export.zip").write_bytes(whole + tail)
    try:
        entries("canvas", folder / "export.zip", LAB, folder / "unpacked")
    except ExportError as error:
        assert "\n" not in str(error)


@given(st.text(max_size=80), st.text(max_size=80))
def test_no_two_names_share_a_file(one: str, other: str) -> None:
    assert (slug(one) == slug(other)) == (one == other)
    assert slug(slug(one)) != slug(one) or slug(one) == one, "a name that looks like another's file is not that file"


ROSTERS = {
    "canvas": "\ufeffStudent,ID,SIS User ID,SIS Login ID,Section,Ring (77)\n    Points Possible,,,,,12\n"
              '"Lovelace, Ada",101,s1,ada,Mon,\n"Hopper, Grace",102,s2,grace,Tue,\n"Pires, José",103,s3,jose,Tue,\n'
              '"Turing, Alan",105,s5,alan,Mon,\n',
    "moodle": "Identifier,Full name,Email address,Status,Grade,Maximum grade,Last modified (submission),"
              "Last modified (grade),Feedback comments\n"
              'Participant 5501,Ada Lovelace,ada@example.org,Submitted,,12,"Tuesday, 1 December 2026, 10:00 PM",-,\n'
              'Participant 5502,Grace Hopper,grace@example.org,Submitted,,12,"Thursday, 3 December 2026, 11:10 PM",-,\n'
              "Participant 5505,Alan Turing,alan@example.org,No submission,,12,-,-,\n",
    "gradescope": "First Name,Last Name,SID,Email,Sections\nAda,Lovelace,101,ada@example.org,Mon\n"
                  "Grace,Hopper,102,grace@example.org,Tue\nAlan,Turing,105,alan@example.org,Mon\n",
    "nbgrader": "id,first_name,last_name,email\nada,Ada,Lovelace,ada@example.org\ngrace,Grace,Hopper,\n"
                "alan,Alan,Turing,\n",
    "classroom": "identifier,github_username,github_id,name\ns1,ada,1,Ada Lovelace\ns2,grace-h,2,Grace Hopper\n"
                 "s5,alan-t,3,Alan Turing\n"}


def told(course: Course) -> dict[str, Record]:
    """All records of a course in which each notebook got 8 of 12 points, by the student's name."""
    raw = {"error": None, "notes": [], "points": 8, "max_points": 12,
           "exercises": {"1": {"points": 8, "max_points": 12, "status": "a check failed", "checks": []}}}
    records = [course.told(e, raw | {"student": e.student, "slug": e.slug, "error": e.error,
                                     "points": 8 if e.path else 0}) for e in course.entries]
    return {record["student"]: record for record in records + course.records_of_missing({1: 12})}


@pytest.mark.parametrize("system", EXPORTS)
def test_the_roster_of_each_system_finds_its_students(system: str, tmp_path: Path) -> None:
    course_ = course(system, export(system, True, tmp_path), tmp_path, ROSTERS[system])
    ada, grace, alan = ("Lovelace, Ada", "Hopper, Grace", "Turing, Alan") if system == "canvas" else (
        "Ada Lovelace", "Grace Hopper", "Alan Turing")
    records = told(course_)
    assert {ada, grace, alan} <= set(records) and records[alan]["error"] == "nothing was handed in"
    assert records[ada]["points"] == 8 and not records[ada]["notes"]
    strangers = [r["student"] for r in records.values() if "not in the roster" in r["notes"]]
    assert strangers, "each export has somebody whom the roster does not"


def test_names_find_each_other_in_any_order_and_spelling(tmp_path: Path) -> None:
    roster = ("id,name,email\n1,José Pires,jp@x.org\n2,Jean Luc Picard,\n3,Kim Lee,\n4,Lee Kim,\n"
              "5,Ada Lovelace,ada.l@x.org\n")
    for name in ("Pires, Jose", "picardjeanluc", "leekim", "ada.l", "Nobody"):
        (tmp_path / "in").mkdir(exist_ok=True)
        (tmp_path / "in" / f"{name}.ipynb").write_text("{}")
    found = course("folder", tmp_path / "in", tmp_path, roster)
    by_name = {e.student: found.known[e.slug].id for e in found.entries if e.slug in found.known}
    assert by_name == {"Pires, Jose": "1", "picardjeanluc": "2", "ada.l": "5"}, "two students are called leekim"
    assert [student.id for student in found.missing] == ["3", "4"]


@pytest.mark.parametrize("text, words", [
    ("a,b\n1,2\n", "no column called id, name, email or login"), ("", "has no student in it"),
    ("id,name\n1,A\n1,B\n", "two students with id 1"),
    ("id,due\n1,soon\n", "a time that can't be read: soon; write 2026-12-01T23:59")])
def test_a_bad_roster_is_refused_in_a_sentence(text: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "roster.csv").write_text(text)
    with pytest.raises(RosterError, match=words):
        read_roster(tmp_path / "roster.csv")


def test_what_is_late_loses_what_the_rules_say(tmp_path: Path) -> None:
    """Grace: a day and 10 minutes late are two days begun; an extension takes that away; unknown times cost nothing."""
    rules, source = Rules(when("2026-12-01T23:00Z"), 10, 3), export("gradescope", True, tmp_path)
    records = told(course("gradescope", source, tmp_path, rules=rules))
    assert (records["Ada Lovelace"]["points"], records["Ada Lovelace"]["late"]) == (8, "")
    grace = records["Grace Hopper"]
    assert (grace["earned"], grace["points"], grace["late"]) == (8, 6.4, "1 day")
    roster = "id,name,due\n102,Grace Hopper,2026-12-03T00:00Z\n"
    assert told(course("gradescope", source, tmp_path, roster, rules))["Grace Hopper"]["points"] == 8
    canvas = told(course("canvas", export("canvas", True, tmp_path), tmp_path, rules=rules))
    assert canvas["hoppergrace"]["points"] == 8
    assert canvas["hoppergrace"]["notes"][-1] == "when it was handed in is not known, but it was late"


@given(st.integers(0, 10 ** 6), st.floats(0, 100), st.integers(0, 10))
def test_a_share_never_grows_with_time(seconds: int, per_day: float, days: int) -> None:
    rules = Rules(None, per_day, days)
    late = timedelta(seconds=seconds + 1)
    assert 0 <= rules.share(late + timedelta(hours=1)) <= rules.share(late) <= rules.share(None) == 1
    assert rules.share(timedelta(days=days, seconds=1)) == 0
    assert not re.search(r"\b0 ", in_words(late))


def rows(text: str | None) -> list[dict[str, str]]:
    assert text is not None
    return list(csv.DictReader(io.StringIO(text)))


def test_canvas_reads_its_own_columns_again(tmp_path: Path) -> None:
    """Checked against Canvas's importer: the first cell says Student, the second ID, then a row of possible points."""
    records = told(course("canvas", export("canvas", True, tmp_path), tmp_path, ROSTERS["canvas"]))
    text = upload_csv("canvas", list(records.values()), "Ring (77)")
    table = rows(text)
    assert list(table[0]) == ["Student", "ID", "SIS User ID", "SIS Login ID", "Section", "Ring (77)"]
    assert table[0]["Student"].strip() == "Points Possible" and table[0]["Ring (77)"] == "12"
    by_id = {row["ID"]: row for row in table[1:]}
    assert [by_id["101"][name] for name in ("Ring (77)", "SIS Login ID", "Section")] == ["8", "ada", "Mon"]
    assert by_id["105"]["Ring (77)"] == "", "nothing was handed in: the instructor decides"


def test_moodle_finds_identifier_grade_and_time(tmp_path: Path) -> None:
    records = told(course("moodle", export("moodle", True, tmp_path), tmp_path, ROSTERS["moodle"]))
    table = {row["Identifier"]: row for row in rows(upload_csv("moodle", list(records.values()), "ring"))}
    assert table["Participant 5501"]["Grade"] == "8" and table["Participant 5505"]["Grade"] == ""
    assert table["Participant 5504"]["Grade"] == "8", "who is not on the worksheet keeps the number of the folder"
    assert table["Participant 5501"]["Last modified (grade)"] == "-"
    assert table["Participant 5501"]["Feedback comments"] == "exercise 1: 8 of 12, a check failed"


BY_HAND = 'id,Essay (5),Essay comment,Figure (2)\n101,4.5,"Say why, too.",2\n102,,,1\n'


def test_questions_graded_by_hand_are_in_the_totals(tmp_path: Path) -> None:
    (tmp_path / "hand.csv").write_text(BY_HAND)
    found = Course.read("canvas", export("canvas", True, tmp_path), LAB, tmp_path / "unpacked", None, Rules(),
                        tmp_path / "hand.csv")
    records = told(found)
    ada, grace, jean = (records[name] for name in ("lovelaceada", "hoppergrace", "picardjeanluc"))
    assert (ada["points"], ada["max_points"]) == (8 + 4.5 + 2, 12 + 5 + 2)
    assert ada["by_hand"][0]["comment"] == "Say why, too."
    assert (grace["points"], grace["max_points"]) == (9, 19)
    assert grace["notes"][-1] == "not graded by hand yet: Essay"
    assert jean["notes"][-1] == "not graded by hand yet: Essay, Figure" and jean["max_points"] == 19
    table = rows(grades_csv([ada, grace]))
    assert [row["Essay"] for row in table] == ["4.5", ""] and [row["points"] for row in table] == ["14.5", "9"]
    assert "Say why, too." in student_page(ada, "ring")
    assert gradescope(ada)["tests"][-2] == {"name": "Essay", "score": 4.5, "max_score": 5, "visibility": "visible",
                                            "output": "Say why, too."}


def test_no_points_by_hand_are_lost(tmp_path: Path) -> None:
    """A line finds its student by the roster's id, where the export knows a login; who is nowhere is named."""
    (tmp_path / "hand.csv").write_text("id,Essay (5)\ns1,3\ns5,4\ns9,5\n")
    (tmp_path / "roster.csv").write_text(ROSTERS["classroom"])
    found = Course.read("classroom", export("classroom", True, tmp_path), LAB, tmp_path / "unpacked",
                        tmp_path / "roster.csv", Rules(), tmp_path / "hand.csv")
    records = told(found)
    assert records["Ada Lovelace"]["points"] == 8 + 3, "s1 hands in as ada"
    assert records["Alan Turing"]["points"] == 4
    assert "s5,4,17" in upload_csv("classroom", list(records.values()), "ring")
    assert found.unplaced == ["s9"]


@pytest.mark.parametrize("text, words", [
    ("id,name\n1,A\n", 'has no question: a column is called "Essay \\(5\\)"'),
    ("id,Essay (5)\n1,many\n", "Essay \\(5\\): many is no number of points"),
    ("id,Essay (5)\n1,6\n", "6 is not from 0 to 5 points"), ("id,Essay (5)\n1,-1\n", "-1 is not from 0 to 5 points")])
def test_bad_points_by_hand_are_refused_in_a_sentence(text: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "hand.csv").write_text(text)
    with pytest.raises(RosterError, match=words):
        read_by_hand(tmp_path / "hand.csv")


def test_a_system_that_imports_nothing_has_no_file() -> None:
    assert upload_csv("folder", [], "ring") is None and upload_csv("nbgrader", [], "ring") is None


def test_reports_are_right_while_grading_runs(tmp_path: Path) -> None:
    found = told(course("canvas", export("canvas", True, tmp_path), tmp_path))
    also = {"canvas.csv": lambda records: upload_csv("canvas", records, "ring")}
    reports = Reports("ring", tmp_path / "out", len(found), also)
    for number, record in enumerate(found.values(), 1):
        reports.add(record)
        page = (tmp_path / "out" / "index.html").read_text("utf-8")
        assert f"{number} of {len(found)} submissions graded" in page and 'http-equiv="refresh"' in page
        assert (tmp_path / "out" / "canvas.csv").read_text("utf-8").startswith(BOM)
        assert len(rows((tmp_path / "out" / "grades.csv").read_text("utf-8-sig"))) == number
    reports.close()
    page = (tmp_path / "out" / "index.html").read_text("utf-8")
    assert f"{len(found)} submissions" in page and "refresh" not in page
    assert not list((tmp_path / "out").rglob("*.part"))


@pytest.mark.slow
@pytest.mark.parametrize("user", USERS)
def test_an_export_is_graded_to_the_file_that_is_uploaded(user: str, tmp_path: Path) -> None:
    graded = GradedCourse(tmp_path, attack_lab(1), user == "nobody")
    right = nbformat.writes(answered(graded.lab))
    (graded.folder / "submissions").rmdir()
    zipped({"lovelaceada_101_1_lab.ipynb": right, "hoppergrace_102_2_work.zip": {"lab.ipynb": right}},
           graded.folder / "submissions")
    (graded.folder / "roster.csv").write_text(ROSTERS["canvas"], encoding="utf-8")
    run = graded.grade("--from", "canvas", "--roster", str(graded.folder / "roster.csv"), "--column", "Ring (77)")
    assert run.returncode == 0, run.stderr
    table = {row["ID"]: row["Ring (77)"] for row in rows(
        (graded.folder / "results" / "canvas.csv").read_text("utf-8-sig")) if row["ID"]}
    points = str(sum(lab_points(graded.lab).values()))
    assert table == {"101": points, "102": points, "103": "", "105": ""}
    assert graded.left_behind() == ([], [])


def test_the_time_left_is_told_from_what_this_run_has_graded() -> None:
    now = [100.0]
    pace = Pace(10, 2, lambda: now[0])
    now[0] = 500.0  # the lab's own solutions ran
    pace.begin()
    for _ in range(4):
        pace.add(kept=True)
    assert pace.words() == "" and pace.left_s() is None
    for _ in range(2):  # two at once, 240 s each; the next two have just begun, and count as half done
        now[0] += 120
        pace.add(kept=False)
    assert pace.left_s() == 3 * 80 and pace.words() == "about 4 minutes left"
    for _ in range(4):
        now[0] += 120
        pace.add(kept=False)
    assert pace.words() == "" and pace.left_s() == 0


RING = LABS / "03_ring_all_reduce.ipynb"
SECRET = "0123456789abcdef" * 2


def test_200_students_have_200_pairs_of_numbers_that_the_lab_allows() -> None:
    lab = read_lab(RING)
    found = [drawn(lab, RING.stem, SECRET, Student(str(number), "")) for number in range(200)]
    assert len({tuple(numbers.values()) for numbers in found}) == 200
    assert all(3 <= numbers["MY_RANKS"] <= 12 and numbers["MY_BYTES"] % 27720 == 0 < numbers["MY_BYTES"]
               for numbers in found)
    assert found == [drawn(lab, RING.stem, SECRET, Student(str(number), "renamed")) for number in range(200)]
    others = [drawn(lab, RING.stem, SECRET[::-1], Student(str(number), "")) for number in range(200)]
    assert sum(one == other for one, other in zip(found, others)) < 3


def own_lab() -> nbformat.NotebookNode:
    """The lab to attack with one exercise, whose check asks for a number of the student's own."""
    lab = attack_lab(1)
    for cell in code_cells(lab):
        if marks(cell)["id"] == "seed":
            cell.source = "SEED = 3\nMINE = 12"
            cell.metadata["lockstep"]["own"] = {"MINE": [10, 10**9, 1]}
        elif marks(cell)["id"] == "bounds":
            cell.source += "\n\n\ndef doubled():\n    ### BEGIN SOLUTION\n    return 2 * MINE\n    ### END SOLUTION"
        elif marks(cell)["id"] == "check-1":
            cell.source += '\nassert doubled() == 2 * MINE, f"twice {MINE} is another number"'
    return lab


def numbered(copy: nbformat.NotebookNode, number: int) -> nbformat.NotebookNode:
    """A copy whose answer is this number, worked out by hand."""
    for cell in code_cells(copy):
        if marks(cell)["id"] == "bounds":
            cell.source = next(c.source for c in code_cells(own_lab()) if marks(c)["id"] == "bounds").replace(
                "2 * MINE", str(number))
    return copy


def test_each_student_gets_a_copy_with_numbers_that_stay(tmp_path: Path) -> None:
    (tmp_path / "roster.csv").write_text("id,name\n1,Ada Lovelace\n2,Grace Hopper\n")
    for folder in ("one", "two"):
        assert main(["release", str(RING), "--roster", str(tmp_path / "roster.csv"), "-o", str(tmp_path / folder)]) == 0
    copies = [tmp_path / "one" / name / file for name in ("1", "2")
              for file in (RING.name, RING.with_suffix(".expected.json").name)]
    numbers = [own_in(next(c.source for c in code_cells(read_lab(copy)) if marks(c)["kind"] == "parameters"),
                      ["MY_RANKS", "MY_BYTES"]) for copy in copies]
    assert numbers[0] == numbers[1] != numbers[2] == numbers[3], "the checks of a copy know its numbers"
    assert all(copy.read_bytes() == (tmp_path / "two" / copy.parent.name / copy.name).read_bytes() for copy in copies)
    secret = tmp_path / f"roster{SUFFIX}"
    assert secret.stat().st_mode & 0o77 == 0 and secret_beside(tmp_path / "roster.csv") == secret.read_text().strip()
    secret.write_text("secret")
    with pytest.raises(RosterError, match="put back the file"):
        secret_beside(tmp_path / "roster.csv")


@pytest.mark.slow
def test_anothers_numbers_give_no_points_and_are_named_to_the_instructor_alone(tmp_path: Path) -> None:
    graded = GradedCourse(tmp_path, own_lab())
    (tmp_path / "roster.csv").write_text("id,name\n1,ada\n2,grace\n3,jean\n4,jose\n")
    (tmp_path / f"roster{SUFFIX}").write_text(SECRET)
    mine = {name: drawn(graded.lab, "lab", SECRET, Student(number, name))["MINE"]
            for number, name in enumerate_from_1("ada", "grace", "jean", "jose")}

    def hand_in(name: str, whose: str, answer: int) -> None:
        copy = numbered(answered(graded.lab), answer)
        seed = next(cell for cell in code_cells(copy) if marks(cell)["id"] == "seed")
        seed.source = f"SEED = 5\nMINE = {mine[whose]}"
        graded.hand_in(name, copy)

    hand_in("ada", "ada", 2 * mine["ada"])
    hand_in("grace", "ada", 2 * mine["ada"])  # Ada's notebook as it is
    hand_in("jean", "jean", 2 * mine["ada"])  # Ada's answer in Jean's own notebook
    hand_in("guest", "ada", 24)  # is in no roster, and is graded with the lab's own number
    run = graded.grade("--roster", str(tmp_path / "roster.csv"))
    assert run.returncode == 0, run.stderr
    told = {name: graded.record(name) for name in ("ada", "grace", "jean", "guest")}
    assert {name: record["points"] for name, record in told.items()} == {"ada": 2, "grace": 0, "jean": 0, "guest": 2}
    status = told["grace"]["exercises"]["1"]["status"]
    assert status == (f"the copy has {numbers_in_words({'MINE': mine['ada']})}: these are another student's numbers, "
                      f"and yours are MINE = {mine['grace']}")
    assert told["jean"]["exercises"]["1"]["status"].startswith("a check failed")
    table = (tmp_path / "results" / "grades.csv").read_text("utf-8-sig").splitlines()
    named = {row["student"]: row["notes"] for row in csv.DictReader(table)}
    assert "the copy has the numbers of ada" in named["grace"] and not named["ada"]
    assert "exercise 1 has the answer of ada, which is right for other numbers" in named["jean"]
    for page in (tmp_path / "results" / "students").iterdir():
        assert page.name.startswith("ada") or not re.search(r"\bada\b", page.read_text()), page


def enumerate_from_1(*names: str) -> list[tuple[str, str]]:
    return [(str(number), name) for number, name in enumerate(names, 1)]


@pytest.mark.slow
def test_gradescopes_zip_grades_a_submission_by_itself(tmp_path: Path) -> None:
    """As Gradescope does it, without the installation: the zip is unpacked, prepared once, then run for a student."""
    lab, place, made = attack_lab(1), tmp_path / "autograder", str(tmp_path / "a.zip")
    nbformat.write(lab, tmp_path / "lab.ipynb")
    assert main(["autograder", str(tmp_path / "lab.ipynb"), "--for", "gradescope", "-o", made]) == 0
    with zipfile.ZipFile(made) as archive:
        archive.extractall(place / "source")
        for name in ("setup.sh", "prepare", "run_autograder"):
            (place / "source" / name).chmod(archive.getinfo(name).external_attr >> 16)
    (place / "submission").mkdir()
    nbformat.write(answered(lab), place / "submission" / "mine.ipynb")
    environment = {**os.environ, "AUTOGRADER": str(place), "PYTHON": sys.executable}  # the book that is installed here
    for script in ("prepare", "run_autograder"):
        subprocess.run([place / "source" / script], env=environment, cwd="/", check=True, timeout=300)
    told = json.loads((place / "results" / "results.json").read_text())
    assert told["score"] == sum(lab_points(lab).values()) and [t["output"] for t in told["tests"]] == ["passed"] * len(
        told["tests"])
    (place / "results" / "results.json").unlink()
    nowhere = {**environment, "PATH": str(tmp_path)}  # no bubblewrap: nothing is graded rather than graded without
    run = subprocess.run([shutil.which("bash"), place / "source" / "prepare"], env=nowhere, cwd="/", text=True,
                         capture_output=True, timeout=60)
    assert run.returncode == 1 and "bubblewrap" in run.stderr and "Traceback" not in run.stderr


def test_a_repository_for_a_class_has_the_copy_and_no_solution(tmp_path: Path) -> None:
    out = tmp_path / "template"
    assert main(["autograder", str(LABS / "03_ring_all_reduce.ipynb"), "--for", "classroom", "-o", str(out)]) == 0
    workflow = yaml.safe_load((out / ".github" / "workflows" / "check.yml").read_text())
    commands = [step.get("run", "") for step in workflow["jobs"]["check"]["steps"]]
    assert commands[-1] == "python -m book.grading check 03_ring_all_reduce.ipynb"
    assert (out / "03_ring_all_reduce.expected.json").exists() and (out / ".lockstep" / "book" / "launch").is_dir()
    text = "".join(path.read_text("utf-8") for path in out.rglob("*.ipynb"))
    assert "BEGIN SOLUTION" not in text and "hidden-1" not in text


def test_a_container_grades_and_says_how_it_is_run(tmp_path: Path) -> None:
    out, lab = tmp_path / "container", str(LABS / "03_ring_all_reduce.ipynb")
    assert main(["autograder", lab, "--for", "container", "-o", str(out)]) == 0
    text = (out / "Containerfile").read_text()
    assert '"/source/lab/03_ring_all_reduce.ipynb"' in text and "unsafe" not in text and "@" not in text
    assert (out / "source" / "lab" / "03_ring_all_reduce.ipynb").exists()
    assert main(["autograder", lab, "--for", "container", "-o", str(out)]) == 1, "nothing is overwritten"
    assert main(["autograder", lab, "--for", "container", "-o", str(tmp_path / "b"), "--unsafe-no-sandbox"]) == 0
    assert "--unsafe-no-sandbox" in (tmp_path / "b" / "Containerfile").read_text()
    assert main(["autograder", lab, "--for", "blackboard", "-o", str(tmp_path / "c")]) == 1


def test_a_cell_without_metadata_is_known_by_its_text_whatever_seed_and_numbers_it_has() -> None:
    own = {marks(cell)["id"]: cell for cell in code_cells(own_lab())}

    def known(source: str) -> list[str | None]:
        return recognised([{"cell_type": "code", "source": source}], own)[0]

    assert known("SEED = 70\nMINE = 123456") == ["seed"] and known("SEED = 70\nOTHER = 12") == [None]
    setup = own["setup"].source
    assert known(setup) == ["setup"] and known(setup + "\nLIMIT = 3") == [None]
    own["setup"].source = setup + "\nLIMIT = 2"
    assert known(setup + "\nLIMIT = 3") == [None], "only what the parameters cell draws may differ"
