"""What was measured last, part by part, with where and when; and the book's page that is written from it."""
from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass

from benchmarks.process import ROOT
from benchmarks.report import Claim, Findings, Table

DATA, PAGE = ROOT / "benchmarks" / "measured.json", ROOT / "chapters" / "94_measurements.md"
UNIT = re.compile(r"(?<=\d) (?=(?:[KM]B|[mµn]?s|million)\b)")
INTRODUCTION = """# Measurements

What this book promises of its tools, and what was measured of it. `make bench` measures everything on your machine,
keeps the numbers in `benchmarks/measured.json` and writes this page from them. The command in each section measures
that part alone and prints it; with `--keep` it is kept as well. Times depend on the machine: each section says which
one, and when.

## What is promised"""


@dataclass(frozen=True)
class Kept:
    """What one part found; `measured_on` is a sentence, `about` another on what has changed since."""

    measured_on: str
    found: Findings
    about: str = ""


def read() -> dict[str, Kept]:
    """What is kept, by the names of the parts."""
    return {name: Kept(part["measured_on"], _findings(part["found"]), part["about"])
            for name, part in json.loads(DATA.read_text("utf-8")).items()}


def write(kept: Mapping[str, Kept]) -> None:
    """Save this, and drop everything else that was kept."""
    parts = {name: asdict(part) for name, part in kept.items()}
    DATA.write_text(json.dumps(parts, indent=1, ensure_ascii=False) + "\n", "utf-8")


def _findings(plain: Mapping[str, list]) -> Findings:
    tables = [Table(table["title"], tuple(table["columns"]), list(map(tuple, table["rows"])), table["note"])
              for table in plain["tables"]]
    return Findings(tables, [Claim(**claim) for claim in plain["claims"]], plain["left_out"])


def page(kept: Mapping[str, Kept], told: Mapping[str, str]) -> str:
    """The book's page: all promises, then a section for each part; `told` has a sentence about each."""
    names = [name for name in told if name in kept]
    sections = [_section(name, kept[name], told[name]) for name in names]
    return "\n\n".join([INTRODUCTION, _promises({name: kept[name] for name in names}), *sections]) + "\n"


def _promises(kept: Mapping[str, Kept]) -> str:
    rows = [(claim.promise, claim.measured, "yes" if claim.kept else "**no**", f"[{name}](#{_anchor(part)})")
            for name, part in kept.items() for claim in part.found.claims]
    return _grid(Table("", ("promise", "measured", "kept", "section"), rows))


def _section(name: str, part: Kept, told: str) -> str:
    """A part's tables under the title of the first one, with what was measured, where, when and by which command."""
    where = f"{part.measured_on} {part.about}".strip()
    parts = [f"## {part.found.tables[0].title}", told, f"{where} Command: `.venv/bin/python -m benchmarks {name}`."]
    for number, table in enumerate(part.found.tables):
        parts += [*([f"### {table.title}"] if number else []), _grid(table), table.note]
    return "\n\n".join(filter(None, [*parts, *(f"Left out: {text}" for text in part.found.left_out)]))


def _grid(table: Table) -> str:
    """A table's cells, in which no line breaks between a number and its unit."""
    return UNIT.sub("\u00a0", table.grid())


def _anchor(part: Kept) -> str:
    """The anchor that the website gives to a part's section."""
    return re.sub(r"[^\w -]", "", part.found.tables[0].title.lower()).replace(" ", "-")
