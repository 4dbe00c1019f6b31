"""L4: what students handed in: for each a notebook, or the reason why there is none."""
from __future__ import annotations

import hashlib
import os
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path

MAX_LOOKED_AT, MAX_DEPTH = 500, 3
SUFFIX = ".ipynb"
JOINERS = "\u200c\u200d"  # invisible, but needed in some names
NUMBERED = re.compile(r"(?:-| ?\()(\d{1,6})\)?$")  # lab-1, lab (1): what systems and browsers call a second copy


@dataclass(frozen=True)
class StudentEntry:
    """A student's entry: a displayable name, a name safe for files, the notebook or an error.

    Where the system that it comes from tells them: the student's `id` there, when it was handed in, whether the system
    calls it `late`, and the names of older copies that are passed over.
    """
    student: str
    slug: str
    path: Path | None
    error: str | None = None
    id: str = ""
    handed_in: datetime | None = None
    late: bool = False
    passed_over: tuple[str, ...] = ()


@dataclass(frozen=True)
class NotebookCopy:
    """A notebook that a student handed in, with the name that it had there; the larger `order`, the newer it is."""
    name: str
    path: Path
    order: int = 0

    @property
    def stem(self) -> str:
        """Its name without the number of a copy."""
        return NUMBERED.sub("", self.name[:-len(SUFFIX)])

    @property
    def age(self) -> tuple[int, int, float]:
        """What newer copies have more of."""
        number = NUMBERED.search(self.name[:-len(SUFFIX)])
        return self.order, int(number[1]) if number else 0, self.path.lstat().st_mtime


def find(folder: Path, lab_name: str) -> list[StudentEntry]:
    """The submissions in `folder`: a notebook NAME.ipynb, or a folder NAME with one notebook in it, for each student.

    If a folder has several notebooks, the newest of those called `lab_name` is taken; at most three levels are
    searched, and links are not followed. Sorted by name.
    """
    found = []
    with os.scandir(folder) as entries:
        for entry in sorted(entries, key=lambda e: e.name):
            if entry.name.startswith("."):
                continue
            if entry.is_dir(follow_symlinks=False):
                found.append(_entry_of(Path(entry.path), lab_name))
            elif entry.name.lower().endswith(SUFFIX):
                name = entry.name[:-len(SUFFIX)]
                found.append(StudentEntry(printable(name), slug(name), Path(entry.path)))
    return apart(found)


def _entry_of(folder: Path, lab_name: str) -> StudentEntry:
    """The entry of the student whose folder this is."""
    try:
        return entry_of(folder.name, notebooks_in(folder), lab_name)
    except OSError as problem:
        why = f"the folder can't be read: {problem.strerror}"
        return StudentEntry(printable(folder.name), slug(folder.name), None, why)


def entry_of(student: str, copies: Sequence[NotebookCopy], lab_name: str) -> StudentEntry:
    """The entry of a student who handed in these notebooks: the newest copy of the lab, or why none can be told."""
    entry = StudentEntry(printable(student), slug(student), None)
    own = [copy for copy in copies if copy.stem == lab_name[:-len(SUFFIX)]] or list(copies)
    if not own:
        return replace(entry, error="no notebook was found")
    if len({copy.stem for copy in own}) > 1:
        return replace(entry, error=f"there are {len(own)} notebooks that could be meant")
    newest = max(own, key=lambda copy: copy.age)
    older = tuple(sorted(printable(copy.name) for copy in own if copy is not newest))
    return replace(entry, path=newest.path, passed_over=older)


def apart(entries: Iterable[StudentEntry]) -> list[StudentEntry]:
    """The entries, except that those with one name for two students become errors."""
    entries = list(entries)
    count = Counter(entry.slug for entry in entries)
    return [StudentEntry(e.student, slug(f"{e.student} {number}"), None, "this name appears more than once")
            if count[e.slug] > 1 else e for number, e in enumerate(entries)]


def skipped(folder: Path) -> list[str]:
    """The names of files that are skipped because they are not notebooks."""
    with os.scandir(folder) as entries:
        return sorted(printable(entry.name) for entry in entries if not entry.name.startswith(".")
                      and not entry.is_dir(follow_symlinks=False) and not entry.name.lower().endswith(SUFFIX))


def notebooks_in(folder: Path) -> list[NotebookCopy]:
    """The notebooks in a folder, three levels deep; links are not followed."""
    notebooks, todo, num_seen = [], [(folder, 1)], 0
    while todo and num_seen < MAX_LOOKED_AT:
        place, depth = todo.pop()
        with os.scandir(place) as entries:
            for entry in entries:
                num_seen += 1
                if num_seen >= MAX_LOOKED_AT:
                    break
                if entry.name.startswith("."):
                    continue
                if entry.is_dir(follow_symlinks=False):
                    if depth < MAX_DEPTH:
                        todo.append((Path(entry.path), depth + 1))
                elif entry.name.lower().endswith(SUFFIX):
                    notebooks.append(NotebookCopy(entry.name, Path(entry.path)))
    return notebooks


def printable(text: str) -> str:
    """Displayable text: control, text-direction and invalid characters are replaced."""
    return "".join(c if c in JOINERS or not unicodedata.category(c).startswith("C") else "\ufffd" for c in text)


def slug(name: str) -> str:
    """A file name for a student, different for different names: no name can be chosen so as to get another's."""
    plain = re.sub(r"[^A-Za-z0-9_-]", "_", name)[:60]
    digest = hashlib.sha256(name.encode("utf-8", "surrogateescape")).hexdigest()[:16]
    taken = plain != name or re.search(r"-[0-9a-f]{16}$", name)  # looks like a name with its digest
    return f"{plain}-{digest}" if taken else plain
