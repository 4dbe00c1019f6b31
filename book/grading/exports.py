"""L4: what the systems that courses use export: a zip or a folder of submissions, read without a hand's turn.

A zip comes from a system that holds what students uploaded, so it is read as untrusted: its names are never used as
paths, and each file, each archive in it, and all of it have a largest size.
"""
from __future__ import annotations

import os
import re
import zipfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any

from book.grading.handed_in import SUFFIX, NotebookCopy, StudentEntry, apart, entry_of, find, printable, skipped
from book.grading.submission import MAX_BYTES

MAX_FILES, MAX_TOTAL = 50_000, 4 << 30  # of an export
MAX_INNER_FILES, MAX_INNER_TOTAL = 500, 64 << 20  # of an archive that a student handed in
MAX_DEPTH = 6
METADATA, TIMESTAMP = "submission_metadata.yml", "timestamp.txt"


class ExportError(ValueError):
    """An export can't be read; the message says why in one sentence."""


@dataclass(frozen=True)
class ExportFile:
    """A file of an export: the names on the way to it, and where it can be read; None if nobody needs its content."""
    parts: tuple[str, ...]
    path: Path | None

    @property
    def name(self) -> str:
        """Its own name."""
        return self.parts[-1]


@dataclass(frozen=True)
class Whose:
    """Whose a file is: the student's key and name in the system, and what its own name says."""
    key: str
    student: str
    id: str = ""
    name: str = ""  # of the file, as the student called it; "": as it is called in the export
    order: int = 0
    late: bool = False
    handed_in: datetime | None = None


Reader = Callable[[ExportFile], list[Whose]]


def entries(system: str, source: Path, lab_name: str, into: Path,
            logins: Sequence[str] = ()) -> tuple[list[StudentEntry], list[str]]:
    """The entries of all students in an export of `system`, sorted by name, and the names of files that are skipped.

    `source` is the zip or the unpacked folder; what a zip holds is written to the folder `into`, under names of our
    own. `logins`: the names on GitHub that the roster knows. Raises ExportError for an unknown system, for what can't
    be read, and where nothing has the names that this system gives.
    """
    if system not in SYSTEMS:
        raise ExportError(f"there is no system {system!r}: name one of {', '.join(SYSTEMS)}")
    if system == "folder" and source.is_dir():
        return find(source, lab_name), skipped(source)
    items = list(_items(source, into))
    whose, left = SYSTEMS[system](items, logins), []
    found: dict[str, list[tuple[Whose, ExportFile]]] = {}
    for item in items:
        owners = whose(item)
        for owner in owners:
            found.setdefault(owner.key, []).append((owner, item))
        if not owners and item.name not in (METADATA, TIMESTAMP):
            left.append(printable("/".join(item.parts)))
    if not found:
        raise ExportError(f"nothing in {source} has the names that {system} gives to submissions: is it an export of "
                          "another system?")
    all_of = sorted(found.values(), key=lambda files: files[0][0].student)
    return apart(_entry(files, lab_name) for files in all_of), left


def _entry(files: Sequence[tuple[Whose, ExportFile]], lab_name: str) -> StudentEntry:
    """The entry of a student, from all files that are theirs."""
    first = files[0][0]
    copies = [NotebookCopy(owner.name or item.name, item.path, owner.order)
              for owner, item in files if item.path is not None]
    copies = [copy for copy in copies if copy.name.lower().endswith(SUFFIX)]
    unique = f"{first.student} {first.id}" if first.id not in ("", first.student) else first.student
    entry = replace(entry_of(unique, copies, lab_name), student=printable(first.student), id=printable(first.id),
                    late=any(owner.late for owner, _ in files),
                    handed_in=max(filter(None, (owner.handed_in for owner, _ in files)), default=None))
    if not copies and any(item.name.lower().endswith(".zip") for _, item in files):
        return replace(entry, error="the archive that was handed in can't be opened, or has no notebook")
    return entry


# What an export holds

def _items(source: Path, into: Path) -> Iterator[ExportFile]:
    """All files of an export, those in archives that students handed in among them."""
    into.mkdir(parents=True, exist_ok=True)
    outer = _of_folder(source) if source.is_dir() else _of_zip(source, (), into, MAX_FILES, MAX_TOTAL)
    for number, item in enumerate(outer):
        if number >= MAX_FILES:
            raise ExportError(f"{source} has more than {MAX_FILES} files: is it the folder of one assignment?")
        if item.path is None or not item.name.lower().endswith(".zip"):
            yield item
            continue
        try:
            yield from list(_of_zip(item.path, item.parts, into, MAX_INNER_FILES, MAX_INNER_TOTAL))
        except ExportError:
            yield ExportFile(item.parts, None)


def _of_folder(folder: Path) -> Iterator[ExportFile]:
    """The files of a folder; links are not followed, and names that begin with a dot are passed over."""
    todo: list[tuple[Path, tuple[str, ...]]] = [(folder, ())]
    while todo:
        place, parts = todo.pop()
        with os.scandir(place) as found:
            for entry in sorted(found, key=lambda e: e.name):
                if entry.name.startswith("."):
                    continue
                at = (*parts, entry.name)
                if not entry.is_dir(follow_symlinks=False):
                    yield ExportFile(at, Path(entry.path) if _wanted(entry.name) else None)
                elif len(at) < MAX_DEPTH:
                    todo.append((Path(entry.path), at))


def _of_zip(archive: Path, within: tuple[str, ...], into: Path, max_files: int, max_total: int) -> Iterator[ExportFile]:
    """The files of an archive; those that are needed are written to `into` under numbers."""
    total = 0
    try:
        with zipfile.ZipFile(archive) as opened:
            if len(opened.infolist()) > max_files:
                raise ExportError(f"{archive.name} has more than {max_files} files")
            for info in opened.infolist():
                parts = tuple(part for part in PurePosixPath(info.filename.replace("\\", "/")).parts if part != "/")
                if info.is_dir() or not parts or any(part.startswith((".", "__MACOSX")) for part in parts):
                    continue
                if not _wanted(parts[-1]):
                    yield ExportFile(within + parts, None)
                    continue
                content = _content(opened, info, into)
                total += content.stat().st_size
                if total > max_total:
                    raise ExportError(f"{archive.name} holds more than {max_total >> 20} MiB of notebooks")
                yield ExportFile(within + parts, content)
    except ExportError:
        raise
    except Exception as error:  # zipfile raises whatever a damaged archive leads to
        raise ExportError(f"{archive.name} can't be opened as a zip: {type(error).__name__}") from None


def _content(opened: zipfile.ZipFile, info: zipfile.ZipInfo, into: Path) -> Path:
    """A member's content in a file of ours: its first bytes, so that one that is too large is seen to be."""
    most = MAX_INNER_TOTAL if info.filename.lower().endswith(".zip") else MAX_BYTES
    path = into / f"{len(os.listdir(into)):06d}{PurePosixPath(info.filename).suffix.lower()}"
    with opened.open(info) as member:
        path.write_bytes(member.read(most + 1))
    return path


def _wanted(name: str) -> bool:
    return name.lower().endswith((SUFFIX, ".zip")) or name in (METADATA, TIMESTAMP)


# What each system calls submissions: how to tell from all files of an export whose each of them is

# lovelaceada_LATE_1234_56789_lab.ipynb; the numbers are the user's and the file's, and grow with time.
CANVAS = re.compile(r"(?P<student>.+?)(?P<late>_LATE)?_(?P<id>\d+|anon_[A-Za-z0-9]+)_(?P<order>\d+)_(?P<name>.+)", re.S)
# Ada Lovelace_1234_assignsubmission_file/lab.ipynb, or with _lab.ipynb in the place of the folder.
MOODLE = re.compile(r"(?P<student>.*)_(?P<id>\d+)_assignsubmission_file(?:_(?P<name>.*))?", re.S)


def _named(pattern: re.Pattern[str], items: Sequence[ExportFile], logins: Sequence[str]) -> Reader:
    """A system whose names of files or folders say whose they are."""
    def whose(item: ExportFile) -> list[Whose]:
        for part in item.parts:
            if match := pattern.fullmatch(part):
                told = match.groupdict()
                name = (told["name"] or "") if part == item.name else ""
                return [Whose(told["id"], told["student"], told["id"], name, int(told.get("order", 0)),
                              told.get("late") is not None)]
        return []
    return whose


def _gradescope(items: Sequence[ExportFile], logins: Sequence[str]) -> Reader:
    """Gradescope: submission_1234/lab.ipynb, and beside the folders a file that says whose they are, in YAML."""
    told = next((item for item in items if item.name == METADATA and item.path is not None), None)
    if told is None or told.path is None:
        raise ExportError(f"Gradescope's export has a file {METADATA} beside the submissions, and this one has none")
    by_folder, depth = _metadata(told.path), len(told.parts) - 1

    def whose(item: ExportFile) -> list[Whose]:
        about = by_folder.get(item.parts[depth]) if len(item.parts) > depth else None
        submitters = about.get(":submitters") if about else None  # several for the work of a group
        return [Whose(f"{who.get(':sid')} {who.get(':email')}", str(who.get(":name") or who.get(":email")),
                      str(who.get(":sid") or who.get(":email") or ""), handed_in=when(str(about.get(":created_at"))))
                for who in submitters or [] if about and isinstance(who, dict)]
    return whose


def _metadata(path: Path) -> dict[str, Any]:
    """Gradescope's file: for each folder the submitters and the time. Only plain data is read from it."""
    import yaml

    try:
        found = yaml.load(path.read_bytes(), getattr(yaml, "CSafeLoader", yaml.SafeLoader))
        assert isinstance(found, dict) and all(isinstance(about, dict) for about in found.values())
    except Exception:  # a file of many megabytes, or of another kind, can lead to anything
        raise ExportError(f"{METADATA} is not what Gradescope writes") from None
    return found


def _nbgrader(items: Sequence[ExportFile], logins: Sequence[str]) -> Reader:
    """nbgrader: submitted/ada/lab/lab.ipynb, with a file that says when."""
    stamps = {item.parts[:-1]: when(item.path.read_text(errors="replace")[:200])
              for item in items if item.name == TIMESTAMP and item.path is not None}

    def whose(item: ExportFile) -> list[Whose]:
        start = 1 + item.parts.index("submitted") if "submitted" in item.parts else 0
        if len(item.parts) < start + 3:
            return []
        student = item.parts[start]
        return [Whose(student, student, student, handed_in=stamps.get(item.parts[:start + 2]))]
    return whose


def _classroom(items: Sequence[ExportFile], logins: Sequence[str]) -> Reader:
    """GitHub Classroom: a repository for each student, all in a folder, each called after assignment and login."""
    top = _top(items)
    names = sorted({item.parts[top] for item in items if len(item.parts) > top + 1})
    shared = 0  # so many characters begin all names
    while len(names) > 1 and names[0][:shared + 1] == names[-1][:shared + 1]:
        shared += 1
    shared = names[0][:shared].rfind("-") + 1 if names else 0

    def whose(item: ExportFile) -> list[Whose]:
        if len(item.parts) < top + 2:
            return []
        name = item.parts[top]
        known = [login for login in logins if f"-{name}".lower().endswith(f"-{login}".lower())]
        login = max(known, key=len, default=name[shared:])
        return [Whose(login, login, login)]
    return whose


def _folder(items: Sequence[ExportFile], logins: Sequence[str]) -> Reader:
    """A zip of the folder that `find` takes: NAME.ipynb, or NAME/lab.ipynb."""
    top = _top(items)

    def whose(item: ExportFile) -> list[Whose]:
        if len(item.parts) > top + 1:
            return [Whose(item.parts[top], item.parts[top])]
        name = item.name[:-len(SUFFIX)]
        return [Whose(name, name)] if item.name.lower().endswith(SUFFIX) else []
    return whose


def _top(items: Sequence[ExportFile]) -> int:
    """1 if all is in one folder that holds folders, else 0."""
    return int(len({item.parts[0] for item in items}) == 1 and all(len(item.parts) > 2 for item in items))


SYSTEMS: dict[str, Callable[[Sequence[ExportFile], Sequence[str]], Reader]] = {
    "folder": _folder, "canvas": partial(_named, CANVAS), "moodle": partial(_named, MOODLE), "gradescope": _gradescope,
    "nbgrader": _nbgrader, "classroom": _classroom}


def when(text: str) -> datetime | None:
    """The time that a system wrote, with its zone, else this machine's; None if it is none that can be read."""
    from zoneinfo import ZoneInfo

    from dateutil.parser import ParserError, parse

    text = text.strip()
    zone = re.search(r"\s([A-Z][A-Za-z_]+/[A-Za-z_/+-]+)$", text)
    try:
        found = parse(text[:zone.start()] if zone else text)
        if zone:
            found = found.replace(tzinfo=ZoneInfo(zone[1]))
        return (found if found.tzinfo else found.astimezone()).astimezone(timezone.utc)
    except (ParserError, OverflowError, ValueError, KeyError):
        return None
