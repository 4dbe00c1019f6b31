"""Command line: lockstep lint | mutate | release | check | grade | autograder | similar"""
from __future__ import annotations

import argparse
import os
import sys
import tempfile
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from book.extras import without_iri_grammar

if TYPE_CHECKING:
    from book.grading.course import Course
    from book.grading.own import Owners
    from book.grading.pace import Pace
    from book.grading.report import Reports

    Verbs = argparse._SubParsersAction[argparse.ArgumentParser]

HANDED_IN = "lockstep-handed-in-"  # prefix of the folder that archives are unpacked in
BAR = "{percentage:3.0f}%|{bar}| {n_fmt} of {total_fmt} submissions, {elapsed}{postfix}"
UNSAFE = """
**********************************************************************************************
*  NO SANDBOX. The code in these submissions runs as you, with your files and your network.  *
*  Do this only with submissions that you would run by hand.                                 *
**********************************************************************************************
"""


def main(arguments: list[str] | None = None) -> int:
    """Runs the command and returns the exit status: 0, or 1 if something was found or refused."""
    options = parser().parse_args(arguments)
    without_iri_grammar()
    try:
        return options.run(options)
    except (RuntimeError, ValueError, OSError) as error:
        print(error, file=sys.stderr)
        return 1


def parser() -> argparse.ArgumentParser:
    """The seven verbs and their options."""
    top = argparse.ArgumentParser(prog="lockstep", description="Labs as course assignments.")
    verbs = top.add_subparsers(dest="command", required=True)
    for add_verb in (_add_lint, _add_mutate, _add_release, _add_check, _add_grade,
                     _add_autograder, _add_similar):
        add_verb(verbs)
    return top


def _add_lint(verbs: Verbs) -> None:
    verb = verbs.add_parser("lint", help="is a lab fit to be graded? runs its solutions with two seeds")
    verb.add_argument("labs", nargs="+", type=Path, help="lab notebooks, or folders of them")
    verb.set_defaults(run=lint)


def _add_mutate(verbs: Verbs) -> None:
    verb = verbs.add_parser("mutate", help="what do a lab's checks miss? puts small faults into its solutions")
    verb.add_argument("lab", type=Path, help="the lab's source, with its solutions")
    verb.add_argument("-n", "--num", type=int, default=20, help="random mutants of each exercise (default 20)")
    verb.add_argument("--seed", type=int, default=0, help="another seed draws others (default 0)")
    verb.add_argument("--exercise", type=int, nargs="+", help="these exercises only")
    verb.add_argument("--equivalent", type=Path, metavar="FILE",
                      help="mutants that can't be told from the solution: lines 'before -> after  # reason'")
    verb.set_defaults(run=mutate)


def _add_release(verbs: Verbs) -> None:
    verb = verbs.add_parser("release", help="make student copies: no solutions, no hidden checks")
    verb.add_argument("labs", nargs="+", type=Path, help="lab notebooks, or folders of them")
    verb.add_argument("-o", "--out", type=Path, required=True, help="folder for the copies")
    verb.add_argument("--variant", help="release this variant of the lab, as named in its metadata")
    verb.add_argument("--source", type=Path, metavar="FOLDER",
                      help="with --variant: write the variant's own source there, to grade with")
    verb.add_argument("--nbgrader", action="store_true", help="add nbgrader's metadata to the copies' cells")
    verb.add_argument("--force", action="store_true", help="replace existing copies, with any work in them")
    verb.add_argument("--apart", action="store_true", help="give each lab a folder of its own")
    verb.add_argument("--roster", type=Path, metavar="CSV",
                      help="make a folder for each student, with numbers of their own where a lab draws them")
    verb.set_defaults(run=release)


def _add_check(verbs: Verbs) -> None:
    verb = verbs.add_parser("check", help="for students: run every check of your notebook")
    verb.add_argument("notebook", type=Path, help="your notebook, with its .expected.json beside it")
    verb.add_argument("-e", "--exercise", type=int, action="append", help="only this exercise (may be repeated)")
    verb.set_defaults(run=check)


def _add_grade(verbs: Verbs) -> None:
    verb = verbs.add_parser("grade", help="grade a folder of submissions in a sandbox")
    verb.add_argument("lab", type=Path, help="the lab's source, with its solutions")
    verb.add_argument("submissions", type=Path,
                      help="folder or zip with NAME.ipynb, or a folder NAME with a notebook, for each student; with "
                           "--from, what that system exports")
    verb.add_argument("--from", dest="system", default="folder", metavar="SYSTEM",
                      help="canvas, moodle, gradescope, nbgrader or classroom (GitHub's); default: folder")
    verb.add_argument("--roster", type=Path, metavar="CSV",
                      help="the course's students: id, name, email, section, login, due; or a system's own file")
    verb.add_argument("--by-hand", type=Path, metavar="CSV",
                      help='points of questions graded by hand: a student a line, a column "Essay (5)" a question')
    verb.add_argument("--column", help="name of the assignment in the file to upload (default: the lab's name)")
    verb.add_argument("--due", metavar="TIME", help="2026-12-01T23:59, or with a zone: 2026-12-01T23:59+01:00")
    verb.add_argument("--late-per-day", type=float, default=0.0, metavar="PERCENT",
                      help="points that each day begun after that costs (default 0)")
    verb.add_argument("--late-days", type=int, metavar="N", help="no points for what is more than N days late")
    verb.add_argument("-o", "--out", type=Path, required=True,
                      help="folder for the results; an interrupted run continues there")
    verb.add_argument("-j", "--jobs", type=int, default=1, help="submissions graded side by side (default 1)")
    verb.add_argument("--no-feedback", action="store_true",
                      help="don't run what failed once more for the messages and pictures of the student's page")
    verb.add_argument("--unsafe-no-sandbox", action="store_true",
                      help="run submissions as yourself, with your files and network")
    verb.set_defaults(run=grade)


def _add_autograder(verbs: Verbs) -> None:
    verb = verbs.add_parser("autograder", help="make what a course's system runs by itself")
    verb.add_argument("lab", type=Path, help="the lab's source, with its solutions")
    verb.add_argument("--for", dest="system", required=True, metavar="SYSTEM",
                      help="gradescope (a zip), container or classroom (GitHub's; a folder)")
    verb.add_argument("-o", "--out", type=Path, required=True, help="the zip or folder to write")
    verb.add_argument("--unsafe-no-sandbox", action="store_true",
                      help="grade even where the system forbids the sandbox: answers can then read the lab's source")
    verb.set_defaults(run=autograder)


def _add_similar(verbs: Verbs) -> None:
    verb = verbs.add_parser("similar", help="which answers are alike beyond what their exercise makes alike?")
    verb.add_argument("lab", type=Path, help="the lab's source, with its solutions")
    verb.add_argument("submissions", type=Path, help="as for grade")
    verb.add_argument("--from", dest="system", default="folder", metavar="SYSTEM", help="as for grade")
    verb.add_argument("-o", "--out", type=Path, help="a CSV file for the pairs")
    verb.set_defaults(run=similar)


def lint(options: Any) -> int:
    """Prints what is wrong with labs."""
    from book.grading.lab import read_notebook
    from book.grading.lint import faults
    from book.grading.release import sources_in

    status = 0
    for source in sources_in(options.labs):
        found = False
        for fault in faults(read_notebook(source)):
            print(f"{source}: {fault}", flush=True)
            found = True
        print(f"{source}: {'not fit to be graded' if found else 'fit to be graded'}", flush=True)
        status |= found
    return status


def mutate(options: Any) -> int:
    """Prints what the checks say of faults in a lab's own answers."""
    from book.grading.lab import read_lab
    from book.grading.mutate import read_equivalent, report

    def tell(line: str) -> None:
        print(line, flush=True)

    known, lab = read_equivalent(options.equivalent) if options.equivalent else {}, read_lab(options.lab)
    before = os.getcwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)  # before any rank is started: a mutant may mix up the parts of a path, and save there
        try:
            return int(report(lab, options.num, options.seed, known, tell, options.exercise))
        finally:
            os.chdir(before)


def release(options: Any) -> int:
    """Writes student copies."""
    from book.grading.release import release_all, sources_in

    folders = [(options.labs, options.out)]
    if options.apart:
        folders = [([lab], options.out / lab.stem) for lab in sources_in(options.labs)]
    for labs, out in folders:
        if options.roster:
            _release_to_each(options, labs, out)
            continue
        for line in release_all(labs, out, options.force, options.variant, options.source, options.nbgrader):
            print(line)
    return 0


def _release_to_each(options: Any, labs: list[Path], out: Path) -> None:
    """Writes a copy for each student of the roster, with their own numbers, into a folder of their own."""
    from book.grading.handed_in import slug
    from book.grading.own import SUFFIX, drawn, secret_beside
    from book.grading.release import release_all
    from book.grading.roster import read_roster

    if options.variant:
        raise ValueError("with --roster give the variant's source, which --variant B --source FOLDER has written")
    students = read_roster(options.roster)
    secret = secret_beside(options.roster, make=True) or ""
    for student in students:
        folder = out / slug(student.id or student.name)
        lines = list(release_all(labs, folder, options.force, nbgrader=options.nbgrader,
                                 own=lambda lab, name: drawn(lab, name, secret, student)))  # noqa: B023, used here
        print(f"{student.name or student.id}: {lines[0] if len(lines) == 1 else f'{len(lines)} labs in {folder}'}")
    kept = options.roster.with_suffix(SUFFIX)
    print(f"{len(students)} students. Keep {kept} beside the roster: grading draws the same numbers with it")


def check(options: Any) -> int:
    """Prints a verdict for each exercise of a student's notebook."""
    from book.grading.check import check as verdicts

    def begins(exercise: int) -> None:
        print(f"exercise {exercise} runs ...", file=sys.stderr, flush=True)

    points = max_points = 0
    for verdict in verdicts(options.notebook, options.exercise, begins):
        points, max_points = points + verdict.points, max_points + verdict.max_points
        told = "passed" if verdict.message is None else verdict.message
        print(f"exercise {verdict.exercise}: {verdict.points} of {verdict.max_points} points: {told}", flush=True)
    print(f"{points} of {max_points} points")
    return int(points < max_points)


def autograder(options: Any) -> int:
    """Writes what a system runs by itself."""
    from book.grading.autograder import write_autograder

    print(write_autograder(options.system, options.lab, options.out, options.unsafe_no_sandbox))
    return 0


def similar(options: Any) -> int:
    """Prints the pairs of students whose answers are alike."""
    from book.grading.exports import entries
    from book.grading.lab import read_lab
    from book.grading.similar import ALIKE, pairs, pairs_csv
    from book.grading.submission import SubmissionError, read_submission

    lab, answers = read_lab(options.lab), {}
    with tempfile.TemporaryDirectory(prefix=HANDED_IN) as unpacked:
        for entry in entries(options.system, options.submissions, options.lab.name, Path(unpacked))[0]:
            try:
                answers[f"{entry.student} {entry.id}".strip()] = (
                    read_submission(entry.path, lab).answers if entry.path else {})
            except SubmissionError as error:
                print(f"{entry.student}: {error}", file=sys.stderr)
    found = list(pairs(lab, answers))
    for pair in found:
        print(f"exercise {pair.exercise}: {pair.one} and {pair.other}: {100 * pair.share:.0f} %")
    print(f"{len(answers)} submissions, {len(found)} pairs with {100 * ALIKE:.0f} % or more in common. Alike is not "
          "copied: read both, and talk with the students")
    if options.out:
        options.out.write_text(pairs_csv(found), encoding="utf-8-sig")
    return 0


def grade(options: Any) -> int:
    """Grades submissions, with a progress bar, and writes the reports."""
    from book.grading import sandbox
    from book.grading.lab import points, read_lab
    from book.grading.own import same_answers
    from book.grading.pace import Pace
    from book.grading.report import Reports
    from book.grading.upload import upload_csv

    if options.unsafe_no_sandbox:
        print(UNSAFE, file=sys.stderr)
    else:
        sandbox.probe()
    print("First the lab's own solutions run, then the submissions.", file=sys.stderr, flush=True)
    also = {f"{options.system}.csv": lambda told: upload_csv(options.system, told, options.column or options.lab.stem)}
    with tempfile.TemporaryDirectory(prefix=HANDED_IN) if _packed(options) else nullcontext("") as unpacked:
        course = _course(options, Path(unpacked))
        pace = Pace(len(course.entries), options.jobs)
        reports = Reports(options.lab.stem, options.out, len(course.entries), also, pace.words)
        owners = _owners(options, course)
        records = _graded_with_bar(options, course, reports, owners, pace)
        for slug, notes in same_answers(read_lab(options.lab), records, owners).items():
            told = reports.records[slug]
            reports.add({**told, "for_instructor": [*told["for_instructor"], *notes]})
    missing = course.records_of_missing(points(read_lab(options.lab)))
    for record in missing:
        reports.add(record)
    reports.close()
    print(f"{len(records)} submissions; grades.csv, grades.json, index.html and a page for each student are in "
          f"{options.out}")
    return int(_warn(options, course, records, missing))


def _packed(options: Any) -> bool:
    """Whether what was handed in may be in archives."""
    return options.system != "folder" or not options.submissions.is_dir()


def _course(options: Any, unpacked: Path) -> Course:
    """Who handed in what; raises ValueError for a time that is none, and where there is nothing to grade."""
    from book.grading.course import Course
    from book.grading.exports import when
    from book.grading.roster import Rules

    due = when(options.due) if options.due else None
    if options.due and due is None:
        raise ValueError(f"--due {options.due} is no time: write 2026-12-01T23:59, or 2026-12-01T23:59+01:00")
    if not options.submissions.exists():
        raise ValueError(f"{options.submissions} is not there")
    rules = Rules(due, options.late_per_day, options.late_days)
    course = Course.read(options.system, options.submissions, options.lab.name, unpacked, options.roster, rules,
                         options.by_hand)
    if not course.entries:
        raise ValueError(f"there are no submissions in {options.submissions}: put a notebook, or a folder with one, "
                         "there for each student")
    return course


def _graded_with_bar(options: Any, course: Course, reports: Reports, owners: Owners,
                     pace: Pace) -> list[dict[str, Any]]:
    """The records of all submissions; each advances the progress bar and is printed on stdout."""
    from tqdm import tqdm

    from book.grading.grade import grade as graded

    entries = {entry.slug: entry for entry in course.entries}
    with tqdm(total=len(entries), bar_format=BAR) as bar:
        def done(record: dict[str, Any]) -> None:
            pace.add(kept=record.get("kept", False))
            bar.set_postfix_str(pace.words(), refresh=False)
            told = course.told(entries[record["slug"]], record)
            reports.add(told)
            bar.update()
            bar.write(f"{told['student']}: {told['points']} of {told['max_points']} points"
                      + (f" ({told['error']})" if told["error"] else ""), file=sys.stdout)

        return graded(options.lab, course.entries, options.out, options.jobs, not options.unsafe_no_sandbox, done,
                      not options.no_feedback, owners, pace.begin)


def _owners(options: Any, course: Course) -> Owners:
    """The numbers of the students who are in the roster, if there is one, and a secret beside it."""
    from book.grading.lab import read_lab
    from book.grading.own import NOBODY, owners, secret_beside

    if not options.roster:
        return NOBODY
    return owners(read_lab(options.lab), options.lab.stem, secret_beside(options.roster), course.students)


def _warn(options: Any, course: Course, records: list[dict[str, Any]], missing: list[dict[str, Any]]) -> bool:
    """Names on stderr what was skipped, left over or not graded; returns whether the grader failed."""
    from book.grading.grade import FAILED
    from book.grading.report import stale_pages

    failed = [record["student"] for record in records if (record["error"] or "").startswith(FAILED)]
    stale = stale_pages([*records, *missing], options.out)
    for names, told in ((course.skipped, "skipped, because they are not notebooks (.ipynb)"),
                        (course.unplaced, "graded by hand, but neither handed in nor in the roster"),
                        (stale, "pages of an earlier run, without a submission now"),
                        (failed, "not graded, because the grader failed (run the same command again)")):
        if names:
            print(f"{told}: {', '.join(names)}", file=sys.stderr)
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
