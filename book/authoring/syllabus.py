"""L4: the page of the syllabus as data: what each week asks, reads, shows, sets and discusses."""
from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

SYLLABUS = Path(__file__).resolve().parents[2] / "chapters" / "92_syllabus.md"
WEEK = re.compile(r"^## Week (\d+)\. ([^\n]+)\n(.*?)(?=^## |\Z)", re.M | re.S)
FIELD = re.compile(r"^(\w+)\n: (.*?)(?=\n\n\w+\n: |\Z)", re.M | re.S)
SHOW = re.compile(r"^ *- \[(.+?)\]\((\d\d_\w+)\.ipynb(?:#([\w-]+))?\): (.+)$", re.M)
CHAPTER = re.compile(r"\(((?:0|1)\d_\w+)\.ipynb")


@dataclass(frozen=True)
class ClassFigure:
    """A figure to show in class: how its title begins, on which page, in which section ("" before the first), and what
    to ask before it is played."""

    label: str
    page: str
    anchor: str
    question: str


@dataclass(frozen=True)
class Week:
    """A week of the syllabus; its fields are Markdown, by the term that each stands under."""

    number: int
    title: str
    fields: dict[str, str]

    def chapters(self) -> list[str]:
        """The names of the chapters to read, in their order."""
        return list(dict.fromkeys(CHAPTER.findall(self.fields["Read"])))

    def shown(self) -> list[ClassFigure]:
        """The figures to show."""
        return [ClassFigure(*found) for found in SHOW.findall(self.fields["Show"])]


def weeks(text: str) -> Iterator[Week]:
    """The weeks of a syllabus, in their order; Markdown in the form of chapters/92_syllabus.md."""
    for number, title, body in WEEK.findall(text):
        yield Week(int(number), title, {term: said.strip() for term, said in FIELD.findall(body.strip())})
