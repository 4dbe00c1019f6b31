"""What players add to the pages of the built website: code and data, in bytes."""
from __future__ import annotations

import gzip
from collections.abc import Sequence
from html.parser import HTMLParser
from pathlib import Path

from benchmarks.process import ROOT
from benchmarks.report import Claim, Findings, Table, Unavailable, kilobytes
from book.widgets.registry import WIDGETS, needed, served

SITE = ROOT / "_build" / "html"
QUICK: dict[str, int] = {}
GZIP_LEVEL = 6  # the default of servers
PACKED = {".woff", ".woff2", ".png", ".jpg", ".gz"}  # files that no server compresses again
CODE_BUDGET_BYTES, PAYLOAD_BUDGET_BYTES = 90_000, 60_000  # compressed: all code of widgets; the data of one
NOTE = "Number: of files, or of players on the page. KB: 1000 bytes. Compressed: gzip, as web servers do."


def measure(site: Path = SITE) -> Findings:
    """Weigh the widgets' code and the data of players on the website in `site`; raises `Unavailable` without one."""
    pages = names_of_pages(site)
    return Findings([_table(site, pages)], _claims(site, pages))


def names_of_pages(site: Path) -> list[str]:
    """The chapters and labs of a website, as paths below its folder; raises `Unavailable` if there are none."""
    pages = sorted(str(page.relative_to(site)) for part in ("chapters", "labs") for page in site.glob(f"{part}/*.html"))
    if not pages:
        raise Unavailable("there is no built website: run `make site` first")
    return pages


def plain(file: Path) -> int:
    """A file's bytes."""
    return file.stat().st_size


def compressed(file: Path) -> int:
    """A file's bytes as a web server sends them: gzipped, unless its format is compressed already."""
    content = file.read_bytes()
    return len(content) if file.suffix in PACKED else len(gzip.compress(content, GZIP_LEVEL))


def weight(name: str) -> int:
    """The bytes of a file that pages load for widgets: minified, as the website has it, and compressed."""
    return len(gzip.compress(served(name).encode(), GZIP_LEVEL))


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
    rows = [(f"`{name}`", "1", kilobytes(len(served(name).encode())), kilobytes(weight(name)))
            for name in needed(set(WIDGETS))]
    for page in pages:
        data = payloads(site / page)
        if data:
            rows.append((f"largest data of a player in `{page}`", str(len(data)), kilobytes(len(data[0])),
                         kilobytes(len(gzip.compress(data[0], GZIP_LEVEL)))))
    return Table("What players weigh", ("what", "number", "bytes", "compressed"), rows, NOTE)


def _claims(site: Path, pages: Sequence[str]) -> list[Claim]:
    """Whether players keep to their budgets: compressed, and code minified before."""
    largest = max((len(gzip.compress(data, GZIP_LEVEL)) for page in pages for data in payloads(site / page)), default=0)
    packed = sum(map(weight, needed(set(WIDGETS))))
    return [Claim(f"the code of all widgets is at most {CODE_BUDGET_BYTES // 1000} KB, minified and compressed",
                  kilobytes(packed), packed <= CODE_BUDGET_BYTES),
            Claim(f"the data of a player is at most {PAYLOAD_BUDGET_BYTES // 1000} KB, compressed", kilobytes(largest),
                  largest <= PAYLOAD_BUDGET_BYTES)]
