"""What the pages of the built website weigh with all that they load, and how soon a browser shows something of them."""
from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlparse

from benchmarks.chromium import fresh_page, running_browser, served
from benchmarks.report import Claim, Findings, Table, duration, kilobytes
from benchmarks.weights import SITE, compressed, names_of_pages, plain

QUICK = {"num_loads": 2}
PAINT_BUDGET_S = 0.4
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

    Raises `Unavailable` if there is no website or no browser.
    """
    pages, found = names_of_pages(site), Findings()
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
    """Open a page once: the paths it requested, seconds to the first paint, and to the first player, if it has one."""
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
