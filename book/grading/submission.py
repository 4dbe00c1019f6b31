"""L4: read a submission as untrusted data: only its answer cells are used, and they are found by id."""
from __future__ import annotations

import hashlib
import json
import os
import re
import stat
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import nbformat
from nbformat import NotebookNode

from book.grading.lab import answer_cells, code_cells, marks, own_in, simulated, variant_of
from book.grading.recognised import as_in_lab, recognised, source_of
from book.grading.release import without_solutions
from book.grading.withheld_modules import imports_from_book

MAX_BYTES = 8 << 20
MAX_CELLS = 1000  # all cells of an answer are run, and each is compared with each cell of the lab
MAX_NOTES, MAX_NOTE_CHARS = 20, 200
SETS_SEED = re.compile(r"^SEED\s*=[^=]", re.M)
EDITED = "was edited, which changes nothing"


class SubmissionError(ValueError):
    """A submission can't be read; the message says why in one sentence."""


@dataclass
class Submission:
    """A submission: the sources of each answer by cell id, notes for the instructor, and the copy's own numbers."""
    answers: dict[str, list[str]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    sha256: str = ""
    own: dict[str, int] = field(default_factory=dict)


def read_submission(path: Path, lab: NotebookNode) -> Submission:
    """The answers in the notebook at `path`, for a lab.

    Cells that a learner added belong to the answer above them, or below them if there is none, up to the lab's next
    cell. Raises SubmissionError for a file that is not regular, too large, or not a notebook.
    """
    raw = _read_regular(path)
    notebook, cells = _notebook(raw)
    found = Submission(sha256=hashlib.sha256(raw).hexdigest())
    own = {marks(cell)["id"]: cell for cell in code_cells(lab)}
    try:
        _AnswerReader(own, found).read(cells)
    except RecursionError:  # a source that is a list of lists of lists
        raise SubmissionError("the file is not a notebook") from None
    found.notes += _imports(found, lab) + _seeds(found)
    other = _other_variant(variant_of(notebook.get("metadata")), variant_of(lab.metadata))
    if other:  # its cells differ anyway, without having been edited
        found.notes = other + [note for note in found.notes if not note.endswith(EDITED)]
    found.notes = _shortened(found.notes)
    return found


def answered(lab: NotebookNode, exercise: int, submission: Submission) -> bool:
    """Whether a submission has anything in an exercise's answer cells beyond what the released copy had."""
    return any(source.strip() not in ("", without_solutions(cell.source, exercise)[0].strip())
               for cell in answer_cells(lab, exercise) for source in submission.answers.get(marks(cell)["id"], []))


def _read_regular(path: Path) -> bytes:
    """The bytes of a regular file of acceptable size, without following a link or blocking on a pipe."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise SubmissionError(f"the file can't be opened: {error.strerror}") from None
    with os.fdopen(handle, "rb") as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise SubmissionError("this is not a regular file")
        if status.st_size > MAX_BYTES:
            raise SubmissionError(f"the file is larger than {MAX_BYTES >> 20} MiB")
        return file.read(MAX_BYTES + 1)


def _notebook(raw: bytes) -> tuple[dict[str, Any], list[Any]]:
    """A notebook and its cells, converted from nbformat 3 or older. Raises SubmissionError if it is not a notebook."""
    try:
        notebook = json.loads(raw)
        if "worksheets" in notebook:
            notebook = nbformat.convert(nbformat.from_dict(notebook), 4)
        cells = notebook["cells"]
        assert isinstance(cells, list)
    except Exception:  # nbformat's conversion raises whatever an unexpected type leads to
        raise SubmissionError("the file is not a notebook") from None
    if len(cells) > MAX_CELLS:
        raise SubmissionError(f"the notebook has more than {MAX_CELLS} cells")
    return notebook, cells


def _shortened(notes: list[str]) -> list[str]:
    """The first notes, each of a length that a report can show."""
    more = [f"{len(notes) - MAX_NOTES} more notes"] if len(notes) > MAX_NOTES else []
    return [note if len(note) <= MAX_NOTE_CHARS else note[:MAX_NOTE_CHARS] + "…" for note in notes[:MAX_NOTES]] + more


def _imports(found: Submission, lab: NotebookNode) -> list[str]:
    """A note on modules of the book that answers import but the lab does not."""
    names = set().union(*(imports_from_book(source) for sources in found.answers.values() for source in sources))
    given = set().union(*(imports_from_book(c.source) for c in code_cells(lab)
                          if marks(c)["kind"] == "setup" and not simulated(c)))
    return ["answers import from the book: " + ", ".join(sorted(names - given))] if names - given else []


def _seeds(found: Submission) -> list[str]:
    """A note on answers that give `SEED` another value, after which no check prints what it must."""
    sets = sorted(name for name, sources in found.answers.items() if any(map(SETS_SEED.search, sources)))
    return [f"the answer {name} sets SEED: its checks then print other numbers, and fail" for name in sets]


def _other_variant(theirs: str | None, ours: str | None) -> list[str]:
    """A note if, for example, variant B is graded with the source of variant A."""
    told = "no variant" if theirs is None else f"variant {theirs[:20]}"
    graded = "no variant" if ours is None else f"variant {ours}"
    return [f"the copy is of {told}, but the source that grades it is of {graded}"] if theirs != ours else []


class _AnswerReader:
    """Goes through a submission's cells and keeps the answers."""

    def __init__(self, own: dict[str, NotebookNode], found: Submission) -> None:
        self.own, self.found = own, found
        self.seen: set[str] = set()
        self.answer: str | None = None  # the answer that the learner's own cells belong to
        self.waiting: list[str] = []  # cells before an answer

    def read(self, cells: list[Any]) -> None:
        names, notes = recognised(cells, self.own)
        self.found.notes += notes
        for cell, name in zip(cells, names):
            if name or (isinstance(cell, dict) and cell.get("cell_type") == "code"):
                self._take(source_of(cell), name)
        self._close()
        missing = [i for i, cell in self.own.items() if marks(cell)["kind"] == "answer" and i not in self.seen]
        self.found.notes += [f"answer cell {i} is missing" for i in missing]

    def _take(self, source: str, mark: str | None) -> None:
        if mark is None:
            if source.strip():
                (self.waiting if self.answer is None else self.found.answers[self.answer]).append(source)
            return
        if mark in self.seen:
            self.found.notes.append(f"cell {mark} appears twice")
        self.seen.add(mark)
        if marks(self.own[mark])["kind"] == "answer":
            self.found.answers.setdefault(mark, []).extend([*self.waiting, source])
            self.answer, self.waiting = mark, []
        else:
            self._close()
            self.found.own |= own_in(source, list(marks(self.own[mark]).get("own", {})))
            same = as_in_lab(source, self.own[mark]).strip() == self.own[mark].source.strip()
            if marks(self.own[mark])["kind"] != "parameters" and not same:
                self.found.notes.append(f"cell {mark} {EDITED}")

    def _close(self) -> None:
        if self.waiting:
            self.found.notes.append("cells that belong to no answer were left out")
        self.answer, self.waiting = None, []
