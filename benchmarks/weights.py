"""What players add to the pages of the built website: code and data, in bytes."""
from __future__ import annotations

import gzip
from collections.abc import Sequence
from html.parser import HTMLParser
from pathlib import Path

from benchmarks.process import ROOT
from benchmarks.report import Claim, Findings, Table, Unavailable, kilobytes
from book.widgets.assets import ASSETS, SCRIPTS, STYLES

SITE = ROOT / "_build" / "html"
QUICK: dict[str, int] = {}
GZIP_LEVEL = 6  # what servers use unless told otherwise
PACKED = {".woff", ".woff2", ".png", ".jpg", ".gz"}  # files that no server compresses again
# What widgets are made of, a .js and a .css each: what all share and the chunk player; what timelines share; others.
CODE_BUDGETS_BYTES = {("controls", "player"): 42 * 1024, ("lanes",): 4 * 1024, ("timeline",): 18 * 1024,
                      ("shards",): 14 * 1024, ("pipeline", "game"): 26 * 1024, ("mesh",): 23 * 1024,
                      ("layouts",): 13 * 1024, ("memory", "memory_bars"): 20 * 1024}
PAYLOAD_BUDGET_BYTES = 30_000
NOTE = "Number: of files, or of players on the page. KB: 1000 bytes. Compressed: gzip, as web servers do."


def measure(site: Path = SITE) -> Findings:
    """Weigh the widgets' code, and the data of the players in the website in `site`; raises `Unavailable` for none."""
    pages = names_of_pages(site)
    return Findings([_table(site, pages)], _claims(site, pages))


def names_of_pages(site: Path) -> list[str]:
    """The chapters and labs of a website, as paths below its folder; raises `Unavailable` where there are none."""
    pages = sorted(str(page.relative_to(site)) for part in ("chapters", "labs") for page in site.glob(f"{part}/*.html"))
    if not pages:
        raise Unavailable("there is no built website: run `make site` first")
    return pages


def plain(file: Path) -> int:
    """A file's bytes."""
    return file.stat().st_size


def compressed(file: Path) -> int:
    """A file's bytes as a web server sends them: with gzip, unless its format is compressed already."""
    content = file.read_bytes()
    return len(content) if file.suffix in PACKED else len(gzip.compress(content, GZIP_LEVEL))


class Payloads(HTMLParser):
    """Collect the data of the players in a page."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[bytes] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Keep the attributes that widgets read their data from."""
        self.found.extend(value.encode() for name, value in attrs if name.startswith("data-lockstep-") and value)


def payloads(page: Path) -> list[bytes]:
    """The data of each player in a page, largest first."""
    parser = Payloads()
    parser.feed(page.read_text("utf-8"))
    return sorted(parser.found, key=len, reverse=True)


def _table(site: Path, pages: Sequence[str]) -> Table:
    """What widgets add to the pages that they are on: the code that they share, and the data of each."""
    rows = [(f"`{name}`", "1", kilobytes(plain(ASSETS / name)), kilobytes(compressed(ASSETS / name)))
            for name in SCRIPTS + STYLES]
    for page in pages:
        data = payloads(site / page)
        if data:
            rows.append((f"largest data of a player in `{page}`", str(len(data)), kilobytes(len(data[0])),
                         kilobytes(len(gzip.compress(data[0], GZIP_LEVEL)))))
    return Table("What players weigh", ("what", "number", "bytes", "compressed"), rows, NOTE)


def _claims(site: Path, pages: Sequence[str]) -> list[Claim]:
    """Whether players keep to their budgets: code and data as they stand, uncompressed."""
    largest = max((len(data) for page in pages for data in payloads(site / page)), default=0)
    return [_code_claim(parts, budget) for parts, budget in CODE_BUDGETS_BYTES.items()] + [
        Claim(f"the data of a player is at most {PAYLOAD_BUDGET_BYTES // 1000} KB", kilobytes(largest),
              largest <= PAYLOAD_BUDGET_BYTES)]


def _code_claim(parts: Sequence[str], budget_bytes: int) -> Claim:
    files = [ASSETS / f"{part}.{kind}" for part in parts for kind in ("js", "css")]
    code, packed = (sum(map(measure_file, files)) for measure_file in (plain, compressed))
    return Claim(f"the code of {' and '.join(parts)} is at most {budget_bytes:,} bytes",
                 f"{code:,} bytes ({kilobytes(packed)} compressed)", code <= budget_bytes)
