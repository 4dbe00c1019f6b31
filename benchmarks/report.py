"""What a benchmark found, as Markdown: tables, the book's claims and what was measured, and what was left out."""
from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field


class Unavailable(Exception):
    """A benchmark, or one of the things it compares with, cannot run here; the text says what is missing."""


@dataclass(frozen=True)
class Table:
    """A titled table of texts, a tuple for each row; the note stands below it."""

    title: str
    columns: tuple[str, ...]
    rows: list[tuple[str, ...]]
    note: str = ""

    def markdown(self) -> str:
        """Its title, its grid, its note."""
        return "\n\n".join(filter(None, [f"**{self.title}**", self.grid(), self.note]))

    def grid(self) -> str:
        """The cells as Markdown, the first column to the left and the others to the right."""
        rule = [":--", *["--:"] * (len(self.columns) - 1)]
        lines = [f"| {' | '.join(row)} |" for row in (self.columns, *self.rows)]
        return "\n".join([lines[0], f"|{'|'.join(rule)}|", *lines[1:]])


@dataclass(frozen=True)
class Claim:
    """Something that the book promises, and what was measured."""

    promise: str
    measured: str
    kept: bool


@dataclass
class Findings:
    """What one part of a run found."""

    tables: list[Table] = field(default_factory=list)
    claims: list[Claim] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)

    def markdown(self) -> str:
        """Its tables, then what was left out and why."""
        left_out = [f"Left out: {text}" for text in self.left_out]
        return "\n\n".join([*(table.markdown() for table in self.tables), *left_out])


def claims_table(claims: Sequence[Claim]) -> Table:
    """Every claim with what was measured, and whether it was kept."""
    rows = [(claim.promise, claim.measured, "yes" if claim.kept else "**no**") for claim in claims]
    return Table("What is promised", ("promise", "measured", "kept"), rows)


def document(measured_on: str, findings: Sequence[Findings]) -> str:
    """One run as Markdown: where and when, the claims, then the tables."""
    claims = [claim for found in findings for claim in found.claims]
    parts = [measured_on, *([claims_table(claims).markdown()] if claims else []), *(f.markdown() for f in findings)]
    return "\n\n".join(filter(None, parts))


def ratio(values: Sequence[float]) -> str:
    """Paired ratios in one cell: the median, and in parentheses the smallest and the largest."""
    if len(values) == 1:
        return f"{values[0]:.3g}"
    return f"{statistics.median(values):.3g} ({min(values):.3g}–{max(values):.3g})"


def duration(seconds: float) -> str:
    """Seconds as a reader wants them: 12 µs, 3.4 ms, 0.21 s, 12.3 s."""
    for limit, scale, unit in ((1e-3, 1e6, "µs"), (0.1, 1e3, "ms")):
        if seconds < limit:
            return f"{seconds * scale:.{0 if seconds * scale >= 100 else 1}f} {unit}"
    return f"{seconds:.{1 if seconds >= 10 else 2}f} s"


def size(num_bytes: int) -> str:
    """A buffer's size in powers of 1024, written as the book writes it: 1 KB, 64 MB."""
    return f"{num_bytes >> 20} MB" if num_bytes >= 1 << 20 else f"{num_bytes >> 10} KB"


def kilobytes(num_bytes: int) -> str:
    """A file's size in units of 1000 bytes."""
    return f"{num_bytes / 1000:.1f} KB"
