"""Answers as learners give them, each kept as a patch of the solution that the lab holds.

A file exercise_N.diff below the name of a lab holds the answers to one exercise. Each begins with a line
`name: part of the message that it must get`, or `name: pass`; `name: hidden: ...` if the learner's own checks miss it
and a hidden one must find it. Its patch follows: lines that begin with "-" are replaced by those that begin with "+"; lines
that begin with a space are kept, and say where. A line "-..." stands for all lines before the next one that is named,
or for the rest. A line "@@" begins another place. `name on other: ...` is a patch of the answer called `other` instead.
An empty line ends an answer.
"""
from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import nbformat

from book.grading.trial import solution

HERE = Path(__file__).parent
LABS = {path.stem: nbformat.read(path, as_version=4) for path in sorted((HERE.parents[1] / "labs").glob("*.ipynb"))}
PASS = "pass"
HIDDEN = "hidden: "
REST = "..."


@dataclass(frozen=True)
class Answer:
    """An answer to an exercise of a lab, its whole code, what a check must say of it, and the file that holds it.

    `hidden` says whether the checks that the learner has must pass.
    """
    lab: str
    exercise: int
    name: str
    expected: str
    hidden: bool
    source: str
    path: Path


@cache
def answers(lab: str) -> list[Answer]:
    """All kept answers to a lab, by exercise, in the order of its file."""
    found = []
    for path in sorted((HERE / lab).glob("exercise_*.diff")):
        exercise = int(path.stem.removeprefix("exercise_"))
        written = {name: (base, expected, patch) for name, base, expected, patch in read(path.read_text("utf-8"))}

        def source(name: str) -> str:
            base, _, patch = written[name]
            try:
                return apply(patch, source(base) if base else solution(LABS[lab], exercise))
            except ValueError as error:
                where = f"answer {name!r} of {path.parent.name}/{path.name} does not fit the lab's solution"
                raise ValueError(f"{where}: {error}") from None

        for name, (_, expected, _) in written.items():
            found.append(Answer(lab, exercise, name, expected.removeprefix(HIDDEN), expected.startswith(HIDDEN),
                                source(name), path))
    return found


def read(text: str) -> Iterator[tuple[str, str, str, list[str]]]:
    """The (name, name of the answer that it changes or "", expected message, lines of the patch) of each answer."""
    for block in filter(None, text.strip("\n").split("\n\n")):
        head, *patch = block.split("\n")
        names, _, expected = head.partition(": ")
        name, _, base = names.partition(" on ")
        if not expected or not name.isidentifier():
            raise ValueError(f"{head!r} must read 'name: expected message' or 'name on other: expected message'")
        yield name, base, expected, patch


def apply(patch: list[str], source: str) -> str:
    """The source with each place of a patch replaced; raises ValueError where a place is not there exactly once."""
    lines = source.split("\n")
    replaced = []
    for place in "\n".join(patch).split("\n@@\n"):
        changes = place.split("\n")
        old, new = ([change[1:] for change in changes if change[:1] in kinds] for kinds in ("- ", "+ "))
        ends = [(start, end) for start in range(len(lines)) if (end := _end(old, lines, start)) is not None]
        if len(ends) != 1:
            raise ValueError(f"the source holds this {len(ends)} times, not once:\n" + "\n".join(old))
        replaced.append((*ends[0], new))
    for start, end, new in sorted(replaced, reverse=True):
        lines[start:end] = new
    return "\n".join(lines)


def _end(old: list[str], lines: list[str], at: int) -> int | None:
    """The end of the old lines of a place that begins at a line; None if they are not there."""
    for number, line in enumerate(old):
        if line == REST:
            following = old[number + 1:number + 2]
            at = lines.index(*following, at) if following and following[0] in lines[at:] else len(lines)
        elif lines[at:at + 1] == [line]:
            at += 1
        else:
            return None
    return at
