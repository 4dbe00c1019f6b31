"""L3: a job as one HTML file that loads nothing: what was said, a picture of its last exchanges, groups and bytes."""
from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path

from book.look.runs import ENDED, FAILED, HUNG, INTERRUPTED, JobRun
from book.report.drawn import drawn
from book.report.shown import Shown, of_run
from book.widgets.calls import Calls, totals_table
from book.widgets.registry import standalone
from book.widgets.streams import StreamsView

STYLE = """<style>
body { max-width: 760px; margin: 20px auto; padding: 0 14px; font: 15px/1.5 system-ui, sans-serif }
h1 { font-size: 20px } h2 { font-size: 16px; margin: 24px 0 8px }
pre { white-space: pre-wrap; overflow-wrap: anywhere; font: 13px/1.5 ui-monospace, monospace; padding: 10px 14px;
  border: 1px solid #8888; border-radius: 10px }
pre span { display: block; padding-left: calc(var(--in) * 1ch + 2ch); text-indent: calc(var(--in) * -1ch - 2ch) }
.wide { overflow-x: auto } table { border-collapse: collapse; font-size: 13px }
th, td { text-align: left; padding: 3px 14px 3px 0; border-bottom: 1px solid #8884 }
th:nth-child(n + 3), td:nth-child(n + 3) { text-align: right; font-variant-numeric: tabular-nums }
:root { color-scheme: light dark }
</style>"""
TITLES = {ENDED: "has ended", HUNG: "hangs", FAILED: "has failed", INTERRUPTED: "was interrupted"}


def page(title: str, said: Sequence[str], found: Shown) -> str:
    """The HTML; without timelines there is no picture, without totals no table, and of what does not hang no graph."""
    parts = [STYLE, f"<h1>{escape(title)}</h1>", f"<pre>{''.join(map(_line, said))}</pre>"]
    if found.standstill:
        parts += ["<h2>Who waits for whom</h2>", drawn(found.standstill.stands)]
    if found.streams:
        parts.append(StreamsView(found.streams).html())
    if any(len(each.calls) for each in found.timelines):
        parts.append(Calls(found.timelines, end=found.end, hangs=found.hangs, common=found.common,
                           by_hosts=found.by_hosts).html())
    if found.totals:
        parts += ["<h2>What was called</h2><div class=wide>", totals_table(found.totals), "</div>"]
    return standalone("calls", title, "\n".join(parts))


def _line(said: str) -> str:
    """Lines of what was said; one that is too long goes on below, two letters further in."""
    return "".join(f'<span style="--in:{len(line) - len(line.lstrip())}">{escape(line)}\n</span>'
                   for line in said.split("\n"))


def write_run_page(path: Path, run: JobRun) -> None:
    """Write the page of a run to a file."""
    title = f"A run of {len(run.timelines)} ranks that {TITLES[run.state]}"
    path.write_text(page(title, run.said, of_run(run)), "utf-8")
