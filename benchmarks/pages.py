"""What the pages of the built website weigh, and how soon a browser shows something of them."""
from __future__ import annotations

import gzip
import statistics
from collections.abc import Sequence
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlparse

from benchmarks.chromium import fresh_page, running_browser
from benchmarks.process import ROOT
from benchmarks.report import Claim, Findings, Table, Unavailable, duration, kilobytes
from book.authoring.serve import served
from book.widgets.assets import ASSETS, SCRIPTS, STYLES

SITE = ROOT / "_build" / "html"
QUICK = {"num_loads": 2}
GZIP_LEVEL = 6  # what servers use unless told otherwise
PACKED = {".woff", ".woff2", ".png", ".jpg", ".gz"}  # files that no server compresses again
# What widgets are made of, a .js and a .css each: what all share and the chunk player; what timelines share; others.
CODE_BUDGETS_BYTES = {("controls", "player"): 42 * 1024, ("lanes",): 4 * 1024, ("timeline",): 18 * 1024,
                      ("shards",): 14 * 1024, ("pipeline", "game"): 26 * 1024, ("mesh",): 23 * 1024,
                      ("layouts",): 13 * 1024, ("memory", "memory_bars"): 20 * 1024}
PAYLOAD_BUDGET_BYTES, PAINT_BUDGET_S = 30_000, 0.4
COLUMNS = ("page", "files", "all files", "compressed", "the page alone", "compressed", "first paint",
           "first player drawn")
NOTE = ("Loaded from this machine with an empty cache, at 1280 px wide; medians of {num_loads}. Compressed: gzip, as "
        "web servers do.")
PLAYER_WATCH = """new MutationObserver((_, watch) => {
  if (!document.querySelector('.lockstep-player svg')) return;
  globalThis.firstPlayer = performance.now();
  watch.disconnect();
}).observe(document, {childList: true, subtree: true})"""
FIRST_PAINT = "performance.getEntriesByName('first-contentful-paint')[0]?.startTime"


def measure(site: Path = SITE, num_loads: int = 9) -> Findings:
    """Load each chapter and lab of the website in `site` `num_loads` times with an empty cache.

    Raises `Unavailable` where there is no website or no browser.
    """
    pages = sorted(str(page.relative_to(site)) for part in ("chapters", "labs") for page in site.glob(f"{part}/*.html"))
    if not pages:
        raise Unavailable("there is no built website: run `make site` first")
    found = Findings([weights(site, pages)], weight_claims(site, pages))
    with served(site) as address, running_browser() as browser:
        loads = {page: [] for page in pages}
        for _ in range(num_loads):
            for page in pages:
                loads[page].append(load(browser, f"{address}/{page}"))
    rows = [_row(site, page, loads[page]) for page in pages]
    found.tables.append(Table("The website's pages", COLUMNS, rows, NOTE.format(num_loads=num_loads)))
    slowest = max(statistics.median(paint for _, paint, _ in of_page) for of_page in loads.values())
    found.claims.append(Claim(f"first paint after at most {duration(PAINT_BUDGET_S)}", duration(slowest),
                              slowest <= PAINT_BUDGET_S))
    return found


def load(browser: Any, url: str) -> tuple[set[str], float, float | None]:
    """Open a page once: the paths it asked for, seconds to the first paint, and to the first player, if it has one."""
    paths: set[str] = set()
    with fresh_page(browser) as page:
        page.on("request", lambda request: paths.add(unquote(urlparse(request.url).path).lstrip("/")))
        page.add_init_script(PLAYER_WATCH)
        page.goto(url, wait_until="load")
        page.wait_for_function(f"{FIRST_PAINT} !== undefined")
        player = page.evaluate("globalThis.firstPlayer")
        return paths, page.evaluate(FIRST_PAINT) / 1e3, player and player / 1e3


def _row(site: Path, page: str, loads: Sequence[tuple[set[str], float, float | None]]) -> tuple[str, ...]:
    files = [site / path for path in set.union(*(paths for paths, _, _ in loads)) if (site / path).is_file()]
    players = [player for _, _, player in loads if player is not None]
    return (f"`{page}`", str(len(files)), kilobytes(sum(map(plain, files))), kilobytes(sum(map(compressed, files))),
            kilobytes(plain(site / page)), kilobytes(compressed(site / page)),
            duration(statistics.median(paint for _, paint, _ in loads)),
            duration(statistics.median(players)) if players else "–")


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


def weights(site: Path, pages: Sequence[str]) -> Table:
    """What widgets add to the pages that they are on: the code that they share, and the data of each."""
    rows = [(f"`{name}`", "1", kilobytes(plain(ASSETS / name)), kilobytes(compressed(ASSETS / name)))
            for name in SCRIPTS + STYLES]
    for page in pages:
        data = payloads(site / page)
        if data:
            rows.append((f"largest data of a player in `{page}`", str(len(data)), kilobytes(len(data[0])),
                         kilobytes(len(gzip.compress(data[0], GZIP_LEVEL)))))
    return Table("What players weigh", ("what", "number", "bytes", "compressed"), rows)


def weight_claims(site: Path, pages: Sequence[str]) -> list[Claim]:
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
