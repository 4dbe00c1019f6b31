"""L3: the picture of a job's last steps: each rank's phases, when it waited for others, and when bytes moved.

A run has, in addition to what scene.js says about all runs,

    duration_s   how long TICKS ticks, the unit of all its times, last
    names        the ranks
    lanes        for each rank three numbers a block: what it did (a place in KINDS), the ticks since the block before,
                 and its own; where there is no block, the rank waits for others
    stops        a moment each: `t`, in ticks, and `say`
"""
from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from book.look.arrivals import Arrivals
from book.look.runs import Totals
from book.look.spans import common, less, union
from book.look.timelines import INNER_FIRST, OTHER, PHASES, Timeline, arrivals_of, waiting_shares
from book.look.told import groups_told
from book.widgets.page import Page, arranged, heading, table
from book.widgets.timeline import TICKS
from book.words import capitalised, in_seconds, named

KINDS = (*PHASES, "exchange")
MOST_BLOCKS, MOST_EXCHANGES = 2400, 12
BLOCKS = 7  # of a rank between two exchanges, about
MARGIN = 0.08  # of the time, after the last thing that was noted of a job that hangs
MOST_RANKS = 16  # in the table for readers without JavaScript
Blocks = list[tuple[int, float, float]]  # what a rank did, and from when to when


class Calls(Page):
    """The picture of the last exchanges of a job, from the notes of its ranks; `end` says how it ended.

    Of one that hangs `common` is when its ranks had last made a call together, in seconds, and a sentence: the picture
    opens there. With `by_hosts` each rank has its host's clock, so that nothing can be said of who is late.
    """

    widget = "calls"

    def __init__(self, timelines: Sequence[Timeline], title: str = "The last exchanges", end: str = "",
                 hangs: bool = False, common: tuple[float, str] | None = None, by_hosts: bool = False):
        self.timelines, self.title, self._end = tuple(timelines), title, end
        self._common, self._by_hosts = common, by_hosts
        self.traces = {}
        self._found = None if by_hosts else arrivals_of(self.timelines)
        self._window = _window(self.timelines, self._found, hangs)

    def with_trace(self, what: Any) -> Calls:
        """The same picture of other notes."""
        return Calls(what, self.title)

    def data(self, live: bool) -> dict[str, Any]:
        """Lanes and stops."""
        start_s, end_s = self._window
        lanes = [flat(blocks(each, self._found, position, self._window), self._window)
                 for position, each in enumerate(self.timelines)]
        source = "by the clock of each host" if self._by_hosts else "as the ranks noted it"
        run = {"source": source, "duration_s": float(f"{end_s - start_s:.6g}"),
               "names": [each.rank for each in self.timelines], "lanes": lanes, "stops": self._stops(),
               "figures": self._figures()}
        if self._common is not None:
            run["opens"] = self._opens(self._common[0])
        return {"title": self.title, **arranged({"": run}, None, None)}

    def _opens(self, moment: float) -> int:
        """Where the picture opens: a stop of its own, so it is neither the start nor the end."""
        return min(TICKS - 1, max(1, tick(moment, self._window)))

    def _stops(self) -> list[dict[str, Any]]:
        before, shown = 0, in_seconds(self._window[1] - self._window[0], "ms")
        stops: list[dict[str, Any]] = [{"t": 0, "say": [["", f"The last {shown}."]]}]
        for t, words in sorted(self._exchanges(), key=lambda one: one[0]):
            if before < t < TICKS:
                before = t
                stops.append({"t": t, "say": [words]})
        return [*stops, {"t": TICKS, "say": [["", capitalised(self._end) or "The end."]]}]

    def _exchanges(self) -> Iterator[tuple[int, list[str]]]:
        """When the last rank came to each exchange, and by how much; where the picture opens."""
        if self._common is not None:
            yield self._opens(self._common[0]), ["", self._common[1]]
        if self._found is None:
            return
        for starts, last in zip(self._found.starts_s, self._found.last):
            first, *_, second, latest = np.sort(starts[~np.isnan(starts)])[[0, 0, -2, -1]]
            rank = self._found.ranks[last]
            yield tick(latest, self._window), [
                f"Rank {rank} comes last", f", {in_seconds(latest - second, 'ms')} after the one before it and "
                f"{in_seconds(latest - first, 'ms')} after the first."]

    def _figures(self) -> list[list[str]]:
        if self._found is None:
            return []
        shares = waiting_shares(self.timelines, self._found)
        most, least = (self._found.ranks[shares.index(each(shares))] for each in (max, min))
        return [[f"{max(shares):.0%}", f"of its time rank {most} waits in communication, the most of all"],
                [f"{min(shares):.0%}", f"rank {least}, the least"],
                [f"{self._found.transfer_share:.0%}", "of the time exchanges take once all have come"]]

    def text(self) -> str:
        """One line that says what is shown."""
        return f"{self.title}: calls of {named(each.rank for each in self.timelines)}"

    def words(self) -> str:
        """How long each rank did what, in the time that is shown."""
        rows = []
        for position, each in enumerate(self.timelines[:MOST_RANKS]):
            found = blocks(each, self._found, position, self._window)
            sums = [sum(end - start for kind, start, end in found if kind == number) for number in range(len(KINDS))]
            rest = self._window[1] - self._window[0] - sum(sums)
            rows.append([f"rank {each.rank}", *(in_seconds(seconds, "ms") for seconds in (*sums, max(0.0, rest)))])
        return heading(self.title) + table(rows, ["", *KINDS, "waits for others"])


def tick(time_s: float, window: tuple[float, float]) -> int:
    """A moment in ticks, within the time that is shown."""
    start_s, end_s = window
    return round(min(1.0, max(0.0, (time_s - start_s) / (end_s - start_s))) * TICKS)


def _window(timelines: Sequence[Timeline], found: Arrivals | None, hangs: bool) -> tuple[float, float]:
    """From when to when is shown: few enough exchanges that the picture stays light."""
    times = np.concatenate([rows[name] for each in timelines for rows in (each.calls, each.phases)
                            for name in ("start_s", "end_s")])
    times = times[times > 0]
    if not len(times):
        return 0.0, 1.0
    start_s, end_s = float(times.min()), float(times.max())
    if found is not None:
        num = max(3, min(MOST_EXCHANGES, MOST_BLOCKS // BLOCKS // len(timelines)))
        start_s = float(np.nanmin(found.starts_s[-num:])) if num < len(found.starts_s) else found.since_s
        end_s = end_s if hangs else found.until_s
    return start_s, end_s + MARGIN * (end_s - start_s) * hangs if end_s > start_s else start_s + 1.0


def blocks(timeline: Timeline, found: Arrivals | None, position: int, window: tuple[float, float]) -> Blocks:
    """What a rank did in the time that is shown, in order."""
    shown = np.array([window])
    waits = _waits(timeline, window)
    own = less(shown, waits)
    drawn: Blocks = []
    for name in INNER_FIRST:
        rows = common(timeline.phase(name, until_s=window[1]), own)
        drawn += [(PHASES.index(name), start, end) for start, end in rows]
        own = less(own, rows)
    drawn += [(PHASES.index(OTHER), start, end) for start, end in own]
    drawn += [(len(PHASES), start, end) for start, end in common(_transfers(found, position), waits)]
    return sorted(drawn, key=lambda one: one[1])


def _waits(timeline: Timeline, window: tuple[float, float]) -> np.ndarray:
    """When a rank waited within the time that is shown, for calls that are not done too."""
    left = timeline.calls[(timeline.calls["waits_s"] > 0) & (timeline.calls["end_s"] == 0)]
    hidden = timeline.collectives[-1:]  # one in a backward that is not over has no wait of its own
    begins = [*left["waits_s"], *hidden["start_s"][(hidden["end_s"] == 0) & ~np.isin(
        hidden["in_group"], timeline.cuts["in_group"])]]
    rows = np.array([(begin, window[1]) for begin in begins]).reshape(-1, 2)
    return common(union(np.concatenate([timeline.waits, rows])), np.array([window]))


def _transfers(found: Arrivals | None, position: int) -> np.ndarray:
    """From when all had come to an exchange until the rank was released from it."""
    if found is None:
        return np.zeros((0, 2))
    rows = np.column_stack([np.nanmax(found.starts_s, axis=1), found.ends_s[:, position]])
    return union(rows[rows[:, 1] > rows[:, 0]])


def flat(found: Blocks, window: tuple[float, float]) -> list[int]:
    """Blocks as numbers, without those that are too short to be seen."""
    numbers, before = [], 0
    for kind, start_s, end_s in found:
        start, end = max(before, tick(start_s, window)), tick(end_s, window)
        if end - start >= TICKS // 4000:
            numbers += [kind, start - before, end - start]
            before = end
    return numbers


def totals_table(totals: Totals) -> str:
    """The calls and bytes of each group as HTML: by its ranks and the name of the operation."""
    groups = groups_told(group for group, _ in totals)
    rows = [[groups[group], name, str(calls), f"{size:,}"] for (group, name), (calls, size) in totals.items()]
    return table(rows, ["group", "operation", "calls", "bytes of a rank's tensors"])
