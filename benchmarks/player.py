"""Frames a second of the player while it plays a ring all-reduce, beside the same page at rest."""
from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.chromium import fresh_page, running_browser
from benchmarks.report import Claim, Findings, Table, Unavailable
from book.collectives import ring_all_reduce
from book.widgets import play
from book.widgets.registry import links, write

QUICK = {"seconds": 1.0}
PROMISED_FRAMES, TOLERATED = 60, 1  # a second; one frame depends on where the counting starts and ends
COLUMNS = ("view", "frames a second at rest", "playing", "playing / at rest", "longest 1 % of frames over",
           "busy per frame")
NOTE = ("Frames: callbacks of requestAnimationFrame, of which a browser makes 60 a second at most. Busy: time of the "
        "page's main thread (scripts, style, layout, paint).")
COUNT_FRAMES = """(seconds) => new Promise((done) => {
  const at = [], more = () => requestAnimationFrame(tick);
  const tick = (now) => { at.push(now); now - at[0] < seconds * 1000 ? more() : done(at); };
  more();
})"""
PAGE = """<!doctype html><html lang="en"><meta charset="utf-8"><title>Player</title>
{links}<body>{player}</body></html>"""


@dataclass(frozen=True)
class Frames:
    """What was counted: frames per second, the shortest of the longest 1 % of frames, busy seconds per frame."""

    per_s: float
    longest_s: float
    busy_s: float


def measure(world_size: int = 16, views: Sequence[str] = ("ring", "matrix"), seconds: float = 5.0) -> Findings:
    """Play a ring all-reduce of `world_size` ranks in each view; raises `Unavailable` if there is no browser."""
    counted = {}
    with tempfile.TemporaryDirectory() as folder, running_browser() as browser:
        for view in views:
            with fresh_page(browser) as page:
                page.goto(write_page(Path(folder), world_size, view).as_uri(), wait_until="load")
                counted[view] = count(page, seconds), count_playing(page, seconds)
    rows = [_row(view, *pair) for view, pair in counted.items()]
    table = Table(f"The player at {world_size} ranks", COLUMNS, rows, NOTE)
    slowest = min(playing.per_s for _, playing in counted.values())
    return Findings([table], [Claim(f"the player shows {PROMISED_FRAMES} frames a second at {world_size} ranks",
                                    f"at least {slowest:.1f}", slowest >= PROMISED_FRAMES - TOLERATED)])


def write_page(folder: Path, world_size: int, view: str) -> Path:
    """A page with one player, as the website shows it."""
    write(folder, {"player"})
    player = play(ring_all_reduce(world_size), view=view)
    page = folder / f"{view}.html"
    page.write_text(PAGE.format(links=links(".", {"player"}), player=getattr(player, "shown", player).html()), "utf-8")
    return page


def count_playing(page: Any, seconds: float) -> Frames:
    """Start the page's player with the space bar and count its frames; raises `Unavailable` if it does not play."""
    page.focus(".lockstep-player")
    page.keyboard.press("Space")
    frames = count(page, seconds)
    if page.get_attribute(".lockstep-player", "data-playing") != "true":
        raise Unavailable(f"the player did not keep playing for the {seconds:g} s in which its frames were counted")
    return frames


def count(page: Any, seconds: float) -> Frames:
    """Count the frames of a page and the time that its main thread is busy."""
    devtools = page.context.new_cdp_session(page)
    devtools.send("Performance.enable")
    busy_s = _busy_s(devtools)
    at_ms = page.evaluate(COUNT_FRAMES, seconds)
    busy_s = _busy_s(devtools) - busy_s
    lengths = sorted(after - before for before, after in pairwise(at_ms))
    longest_ms = lengths[int(0.99 * len(lengths))]
    return Frames(len(lengths) / (at_ms[-1] - at_ms[0]) * 1e3, longest_ms / 1e3, busy_s / len(lengths))


def _busy_s(devtools: Any) -> float:
    metrics = {metric["name"]: metric["value"] for metric in devtools.send("Performance.getMetrics")["metrics"]}
    return metrics["TaskDuration"]


def _row(view: str, rest: Frames, playing: Frames) -> tuple[str, ...]:
    return (view, f"{rest.per_s:.1f}", f"{playing.per_s:.1f}", f"{playing.per_s / rest.per_s:.2f}",
            f"{playing.longest_s * 1e3:.1f} ms", f"{playing.busy_s * 1e3:.1f} ms")
