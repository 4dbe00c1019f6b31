"""L4: grade a folder of submissions: secret seed, sandbox, one kernel per exercise; a killed run can be resumed."""
from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import secrets
import shutil
import tempfile
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import nbformat
from nbformat import NotebookNode

from book.grading import feedback, lab as labs, wired
from book.grading.handed_in import StudentEntry
from book.grading.lab import LabError, marks
from book.grading.own import NOBODY, Owners, digest, in_words, uses_own
from book.grading.ranks import WireMemory, WireRanks
from book.grading.reference import PATIENT, Reference
from book.grading.report import Record
from book.grading.run import Result, run
from book.grading.sandbox import Limits, SandboxError
from book.grading.submission import Submission, SubmissionError, answered, read_submission
from book.grading.warm import Warm
from book.grading.withheld_modules import withheld_modules
from book.wire.broker import WireError, WireTimeout

MAX_SEED = 10 ** 6  # labs multiply it by a thousand, and generators take at most 63 bits
# What `launch` says about a rank's exit status; other errors may contain similar words by accident.
KILLED = re.compile(r"\b(?:RankError|CheckFailed)\S*: rank \d+ was killed by SIG[A-Z]+ before its function returned")
PRIVATE = "private"  # the folder of full records, which quote hidden checks and untrusted code
UNEXPLAINED = ("not answered", "not graded")  # verdicts that say all there is to say
FAILED = "grading it failed"  # prefix of a record's error if the grader itself failed


@dataclass
class Grader:
    """One grading run of one lab: its source, its secret seed, and the references made with it."""
    lab: NotebookNode
    out: Path
    sandboxed: bool = True
    explains: bool = True  # runs what failed once more for the student, without what their copy does not have
    seed: int = 0
    name: str = ""
    sha256: str = ""
    handle: int = -1  # of the folder, which stays locked
    references: dict[int, Reference] = field(default_factory=dict)
    warm: Warm | None = None
    owners: Owners = NOBODY  # the numbers that each student has of their own

    @classmethod
    def start(cls, path: Path, out: Path, sandboxed: bool = True, explains: bool = True) -> Grader:
        """Starts a run in the folder `out`, or resumes the one that is there.

        Raises LabError if `out` holds a run of another lab or of another version of this one, or one in progress.
        """
        grader = cls(labs.read_lab(path), out, sandboxed, explains)
        grader.sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
        (out / PRIVATE).mkdir(parents=True, exist_ok=True)
        grader._lock()
        out.chmod(0o700)  # it holds the seed and everybody's work
        state = out / "run.json"
        fresh: dict[str, Any] = {"lab": path.stem, "sha256": grader.sha256, "seed": secrets.randbelow(MAX_SEED) + 1,
                                 "name": secrets.token_hex(4)}
        kept = _read(state) or fresh
        if kept["sha256"] != grader.sha256:
            raise LabError(f"{out} holds a run of another lab, or of this one before it was changed: name another "
                           "folder")
        write_whole(state, kept)
        grader.seed, grader.name = kept["seed"], kept["name"]
        for left in Path(tempfile.gettempdir()).glob(grader.prefix() + "*"):
            shutil.rmtree(left, ignore_errors=True)  # left over from a run that was killed
        return grader

    def _lock(self) -> None:
        """Locks the folder until `close` or the end of this process."""
        self.handle = os.open(self.out, os.O_RDONLY)
        try:
            fcntl.flock(self.handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise LabError(f"another run is using {self.out} (wait for it to end), or its file system has no locks "
                           "(name another folder)") from None

    def close(self) -> None:
        """Ends warm processes, and releases the lock on the folder."""
        if self.warm is not None:
            self.warm.close()
        os.close(self.handle)

    def prefix(self) -> str:
        """The prefix of this run's temporary folders."""
        return f"lockstep-{self.name}-"

    def ranks(self) -> WireRanks:
        """Ranks for the exercises of one submission."""
        return WireRanks(self.sandboxed, self.prefix(), self.warm)

    def make_references(self, pool: ThreadPoolExecutor) -> None:
        """Makes all references, or reads those of the run being resumed. Raises LabError if a solution fails."""
        kept = _read(self.out / "references.json")
        if kept is None:
            list(pool.map(self.make_reference, labs.points(self.lab)))
            kept = {str(exercise): asdict(reference) for exercise, reference in self.references.items()}
            write_whole(self.out / "references.json", kept)
        self.references = {int(n): Reference.read(written) for n, written in kept.items()}
        self._try_the_wire()

    def make_reference(self, exercise: int) -> None:
        """Runs the lab's own solution of an exercise. Raises LabError if it does not pass its own checks."""
        result = self._run(labs.job(self.lab, exercise, self.seed), exercise, PATIENT)
        self.references[exercise] = Reference.of(result, exercise)

    def _try_the_wire(self) -> None:
        """Runs the lab's own solutions over the wire too, so that ranks that can't start are not blamed on students."""
        with self.ranks() as ranks:
            for exercise in self.references:
                try:
                    why = wired.verdict(self.lab, exercise, None, ranks)
                except WireError as error:
                    why = str(error)
                if why:
                    raise LabError(f"exercise {exercise}'s own solution does not pass over the wire: {why}")

    def attempt(self, exercise: int, submission: Submission, ranks: WireRanks, slug: str = "") -> Record:
        """The verdict on one exercise of a submission: points, which checks passed, and what stopped it, if anything.

        `slug` is the student's name for files. `told` is what a rank over the wire reported, for the student; `retry`
        says that the machine may be to blame.
        """
        record: Record = {"points": 0, "max_points": labs.points(self.lab)[exercise], "status": "passed", "checks": []}
        if not answered(self.lab, exercise, submission):
            return record | {"status": "not answered"}
        numbers = self.owners.drawn.get(slug)
        if numbers and uses_own(self.lab, exercise):
            record["answer"] = digest(self.lab, exercise, submission.answers)
            if self._of_another(submission, slug):
                return record | {"status": f"the copy has {in_words(submission.own)}: these are another student's "
                                           f"numbers, and yours are {in_words(numbers)}"}
        notebook = labs.job(self.lab, exercise, self.seed, submission.answers, numbers)
        labs.expect(notebook, self.references[exercise].outputs)
        result = self._run(notebook, exercise, self.references[exercise].limits)
        record.update(seconds=round(result.wall_s, 1), peak_mb=result.peak_bytes >> 20, log=_log(result))
        return record | self._checked(exercise, result, lambda: self._wired(exercise, submission, ranks))

    def _checked(self, exercise: int, result: Result, wire: Callable[[], Record]) -> Record:
        """What the checks of an exercise say after they have run; `wire()` tries it over the wire, if it has to be."""
        passed, marked = result.passed(), [marks(cell) for cell in labs.checks(self.lab, exercise)]
        checks = [{"id": m["id"], "hidden": bool(m.get("hidden")), "passed": m["id"] in passed} for m in marked]
        if why := result.why or _killed(result):
            return {"checks": checks, "status": "stopped: " + why, "retry": True}
        failed = [check for check in checks if not check["passed"]]
        hidden = [check for check in failed if check["hidden"]]
        record: Record = {"checks": checks, "retry": bool(failed) and _hung(result), "status": "passed"}
        if hidden:  # one costs all points of the exercise, a failed check of the student's copy only its own
            only_hidden = len(hidden) == len(failed)
            return record | {"status": "a check failed" + (" that your copy does not have" if only_hidden else "")}
        if told := _too_large(marked, result, self.references[exercise]):
            return record | {"status": told}
        record |= wire() if passed else {}
        if record["status"] == "passed":
            record["points"] = sum(m.get("points", 0) for m in marked if m["id"] in passed)
            record["status"] = "a check failed" if failed else "passed"
        return record

    def _of_another(self, submission: Submission, slug: str) -> str | None:
        """Whose numbers a student's copy has, if they are those of another student."""
        mine = self.owners.drawn.get(slug)
        return self.owners.whose(submission.own) if mine is not None and submission.own != mine else None

    def for_instructor(self, submission: Submission, slug: str) -> list[str]:
        """What only the instructor is told of a submission."""
        other = self._of_another(submission, slug)
        return [f"the copy has the numbers of {other}"] if other else []

    def explain(self, record: Record, submission: Submission) -> None:
        """Adds to each exercise that lost points what the student's own copy would say, and hands back a notebook."""
        for number, exercise in record["exercises"].items():
            if self.explains and exercise["points"] < exercise["max_points"] and exercise["status"] not in UNEXPLAINED:
                limits = self.references[int(number)].limits
                own = self.owners.drawn.get(record["slug"])
                notebook = feedback.job(self.lab, int(number), submission.answers, own)
                exercise["feedback"] = feedback.told(self._run(notebook, int(number), limits))
        if self.explains:
            back = self.out / "students" / f"{record['slug']}.ipynb"
            back.parent.mkdir(exist_ok=True)
            nbformat.write(feedback.notebook(self.lab, submission, record["exercises"]), back)

    def _wired(self, exercise: int, submission: Submission, ranks: WireRanks) -> Record:
        """The changes to an exercise's record from running it over the wire."""
        try:
            why = wired.verdict(self.lab, exercise, submission.answers, ranks)
        except WireMemory as error:
            return {"status": "stopped: memory limit", "log": str(error), "retry": True}
        except WireTimeout as error:
            return {"status": "stopped: the ranks were not done", "told": str(error), "log": str(error), "retry": True}
        except WireError as error:
            status = "over a wire that only sends and receives: a rank failed"
            return {"status": status, "told": str(error), "log": str(error)}
        return {"status": why} if why else {}

    def _run(self, notebook: NotebookNode, exercise: int, limits: Limits) -> Result:
        hidden_modules = withheld_modules(self.lab, exercise) if self.sandboxed else ()
        return run(notebook, limits, self.sandboxed, hidden_modules, self.prefix(), self.warm)

    def warm_up(self) -> None:
        """Uses warm processes from now on, where the system lets them make sandboxes."""
        warm = Warm(self.lab, self.prefix()) if self.sandboxed else None
        if warm is not None and warm.works():
            self.warm = warm


def grade(lab: Path, entries: Sequence[StudentEntry], out: Path, num_jobs: int = 1, sandboxed: bool = True,
          done: Callable[[Record], None] = lambda record: None, explains: bool = True,
          owners: Owners = NOBODY, begins: Callable[[], None] = lambda: None) -> list[Record]:
    """Grades all submissions, several at a time, and returns a record for each in their order.

    `begins` is called before the first, `done` with each record once it is complete, which is `kept` if an earlier run
    has made it; `owners` have numbers of their own. Exercises that reached a limit or whose ranks hung are retried once
    at the end, one at a time: other submissions may have starved them of resources. Raises LabError for an invalid lab.
    """
    with closing(Grader.start(lab, out, sandboxed, explains)) as grader:
        grader.owners = owners
        grader.warm_up()
        with ThreadPoolExecutor(num_jobs) as pool:
            grader.make_references(pool)
            begins()
            first = list(pool.map(lambda entry: _grade_entry(grader, entry, done), entries))
        return [record if record["complete"] else _again(grader, entry, record, done)
                for entry, record in zip(entries, first)]


def _grade_entry(grader: Grader, entry: StudentEntry, done: Callable[[Record], None]) -> Record:
    """One submission's record: the one on disk if it is for exactly this submission, else a new one."""
    record: Record = {"student": entry.student, "slug": entry.slug, "key": None, "error": entry.error, "notes": [],
                      "exercises": {str(n): {"points": 0, "max_points": p, "status": "not graded", "checks": []}
                                    for n, p in labs.points(grader.lab).items()}}
    with _noted_in(record):
        submission = _submission(entry, grader.lab)
        own = json.dumps(dict(grader.owners.drawn.get(entry.slug, {})))
        made_of = f"{submission.sha256}:{grader.sha256}:{grader.seed}:{grader.sandboxed}:{grader.explains}:{own}"
        record["key"] = hashlib.sha256(made_of.encode()).hexdigest()
        record["notes"] = submission.notes
        record["for_instructor"] = grader.for_instructor(submission, entry.slug)
        kept = _read(grader.out / PRIVATE / f"{entry.slug}.json")
        if kept and kept.get("key") == record["key"] and "fault" not in kept:
            done(kept | {"kept": True})
            return kept
        with grader.ranks() as ranks:
            record["exercises"] = {str(n): grader.attempt(n, submission, ranks, entry.slug)
                                   for n in labs.points(grader.lab)}
        if not _unsettled(record):
            grader.explain(record, submission)
    return _close(grader, record, done, may_retry=True)


@contextmanager
def _noted_in(record: Record) -> Iterator[None]:
    """Notes an error in the submission's record, so that it does not end the run for the others."""
    try:
        yield
    except SubmissionError as error:
        record["error"] = str(error)
    except (SandboxError, LabError):
        raise
    except Exception as error:
        record["error"] = f"{FAILED}: {type(error).__name__}"
        record["fault"] = traceback.format_exc()


def _again(grader: Grader, entry: StudentEntry, record: Record, done: Callable[[Record], None]) -> Record:
    """Grades again, alone, the exercises that a busy machine may have failed, or all of them if the grader failed."""
    failed = record.pop("fault", None)
    record["error"] = None
    with _noted_in(record), grader.ranks() as ranks:
        submission = _submission(entry, grader.lab)
        for number, exercise in record["exercises"].items():
            if failed or exercise.get("retry"):
                again = grader.attempt(int(number), submission, ranks, entry.slug)
                record["exercises"][number] = again | {"tried": 2}
        grader.explain(record, submission)
    return _close(grader, record, done, may_retry=False)


def _close(grader: Grader, record: Record, done: Callable[[Record], None], may_retry: bool) -> Record:
    """Adds up the points; a complete record is written to disk atomically."""
    record["points"] = sum(e["points"] for e in record["exercises"].values())
    record["max_points"] = sum(e["max_points"] for e in record["exercises"].values())
    record["complete"] = not (may_retry and _unsettled(record))
    if record["complete"]:
        write_whole(grader.out / PRIVATE / f"{record['slug']}.json", record)
        done(record)
    return record


def _unsettled(record: Record) -> bool:
    """Whether a busy machine, or the grader, may be to blame for what a record says."""
    return "fault" in record or any(e.get("retry") for e in record["exercises"].values())


def _submission(entry: StudentEntry, lab: NotebookNode) -> Submission:
    if entry.path is None:
        raise SubmissionError(entry.error or "no notebook")
    return read_submission(entry.path, lab)


def _read(path: Path) -> Any:
    """What `write_whole` wrote there; None if there is nothing that can be read."""
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return None


def _too_large(marked: Sequence[dict[str, Any]], result: Result, reference: Reference) -> str | None:
    """The verdict if a check limits the largest process to a multiple of the solution's, and the job exceeded that.

    This is measured from outside, since an answer can make up what it reports.
    """
    times = min((mark["memory"] for mark in marked if "memory" in mark), default=None)
    if times is None or result.largest_bytes <= times * reference.largest_bytes:
        return None
    return (f"one process holds too much: it took {result.largest_bytes >> 20} MiB of memory, where the largest "
            f"of the lab's own solution took {reference.largest_bytes >> 20} MiB")


def _killed(result: Result) -> str | None:
    """The reason if a signal killed a rank, which happens to correct programs too if the machine runs out of memory."""
    killed = any(KILLED.search(cell["traceback"]) for cell in result.cells if not cell["ok"])
    return "a rank was killed" if killed else None


def _hung(result: Result) -> bool:
    """Whether `launch` reported a hang, as it may do for correct programs too on a busy machine."""
    return any("HangError" in cell["traceback"] for cell in result.cells if not cell["ok"])


def _log(result: Result) -> str:
    """What an instructor may want to read about a job that did not pass. It comes from untrusted code."""
    told: Iterable[str] = (f"{c['id']}: {c['message']}\n{c['traceback']}" for c in result.cells if not c["ok"])
    return "\n".join(told)[:8000] or ("" if not result.why else result.log)


def write_whole(path: Path, value: Any) -> None:
    """Writes JSON atomically, readable only by its owner."""
    part = path.with_suffix(".part")
    with open(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
        json.dump(value, file, indent=1)
    os.replace(part, path)
