"""L4: what a folder of submissions holds: for each student a notebook, or the reason why there is none."""
from __future__ import annotations

import hashlib
import os
import re
import unicodedata
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

MAX_LOOKED_AT, MAX_DEPTH = 500, 3
SUFFIX = ".ipynb"
JOINERS = "\u200c\u200d"  # invisible, but needed in some names


@dataclass(frozen=True)
class Entry:
    """A student's entry in the folder: a displayable name, a name safe for files, the notebook or an error."""
    student: str
    slug: str
    path: Path | None
    error: str | None = None


def find(folder: Path, lab_name: str) -> list[Entry]:
    """The submissions in `folder`: a notebook NAME.ipynb, or a folder NAME with one notebook in it, for each student.

    If a folder has several notebooks, the one called `lab_name` is taken; at most three levels are searched, and links
    are not followed. Sorted by name.
    """
    found = []
    with os.scandir(folder) as entries:
        for entry in sorted(entries, key=lambda e: e.name):
            if entry.name.startswith("."):
                continue
            if entry.is_dir(follow_symlinks=False):
                try:
                    path, error = _notebook_in(Path(entry.path), lab_name)
                except OSError as problem:
                    path, error = None, f"the folder can't be read: {problem.strerror}"
                found.append(Entry(printable(entry.name), slug(entry.name), path, error))
            elif entry.name.lower().endswith(SUFFIX):
                name = entry.name[:-len(SUFFIX)]
                found.append(Entry(printable(name), slug(name), Path(entry.path)))
    twice = {slug for slug, count in Counter(entry.slug for entry in found).items() if count > 1}
    return [Entry(e.student, slug(f"{e.student} {number}"), None, "this name appears more than once")
            if e.slug in twice else e for number, e in enumerate(found)]


def skipped(folder: Path) -> list[str]:
    """The names of files that are skipped because they are not notebooks."""
    with os.scandir(folder) as entries:
        return sorted(printable(entry.name) for entry in entries if not entry.name.startswith(".")
                      and not entry.is_dir(follow_symlinks=False) and not entry.name.lower().endswith(SUFFIX))


def _notebook_in(folder: Path, lab_name: str) -> tuple[Path | None, str | None]:
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
                    notebooks.append(Path(entry.path))
    named = [path for path in notebooks if path.name == lab_name] or notebooks
    if len(named) == 1:
        return named[0], None
    return None, f"there are {len(named)} notebooks that could be meant" if named else "no notebook was found"


def printable(text: str) -> str:
    """Displayable text: control, text-direction and invalid characters are replaced."""
    return "".join(c if c in JOINERS or not unicodedata.category(c).startswith("C") else "\ufffd" for c in text)


def slug(name: str) -> str:
    """A file name for a student, different for different names."""
    plain = re.sub(r"[^A-Za-z0-9_-]", "_", name)[:60]
    digest = hashlib.sha256(name.encode("utf-8", "surrogateescape")).hexdigest()[:8]
    return plain if plain == name else f"{plain}-{digest}"
