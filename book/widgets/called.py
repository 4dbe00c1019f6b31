"""L3: the picture of a recording of collectives alone, whose chunks nobody watched: who waits in which.

Its script is that of `calls`, and its runs are as there, with one thing more: `called` has the texts for each
collective of a group, long ones first. Numbers in lanes beyond KINDS say in which of them a rank waits for others, and
in which it exchanges.
"""
from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from book.look.recorded import timelines_in
from book.look.timelines import OTHER, PHASES, Timeline
from book.look.told import groups_told
from book.trace import Trace
from book.waiting.hang import Group
from book.widgets.calls import KINDS, MOST_BLOCKS, MOST_RANKS, Blocks, flat, tick
from book.widgets.page import Page, arranged, heading, names_of, table
from book.widgets.terms import origin
from book.widgets.timeline import TICKS
from book.words import capitalised, in_bytes, in_seconds

WAITS, EXCHANGES = 0, 1
MOST_FIGURES = 5


class Visit(NamedTuple):
    """One rank's time in one collective, in seconds, and when the last rank of the group came to it."""

    rank: int
    what: tuple[str, Group]
    start_s: float
    end_s: float
    last_s: float

    @property
    def moves_s(self) -> float:
        """Since when it does not wait: a root, which may be done before the last has come, never does."""
        return self.start_s if self.end_s < self.last_s else self.last_s


def is_plain(what: Any) -> bool:
    """Whether a trace has collectives with times, and neither messages nor a watched buffer."""
    if not isinstance(what, Trace):
        return False
    kinds = {event.kind for event in what.events if event.kind != "hold" or event.chunk is not None}
    return "collective" in kinds and not kinds & {"send", "recv", "hold"} and bool(timelines_in(what))


class CollectivesView(Page):
    """What `play` shows of recordings that have only collectives: traces by key."""

    widget = "calls"

    def __init__(self, traces: Mapping[Any, Trace], title: str | None = None, labels: Sequence[str] | None = None,
                 select: Any = None):
        for trace in traces.values():
            if not is_plain(trace):
                raise ValueError("this picture is of recordings with collectives alone, and with times")
        self.traces = dict(traces)
        self._given_title, self._labels, self._select = title, labels, select
        names = {trace.name for trace in self.traces.values()}
        self.title = title or capitalised((names.pop() if len(names) == 1 else None) or "who waits in which collective")
        self._runs = [CalledRun(trace) for trace in self.traces.values()]

    def with_trace(self, what: Any) -> CollectivesView:
        """The same picture of another recording."""
        return CollectivesView({"": what}, self._given_title)

    def data(self, live: bool) -> dict[str, Any]:
        """The lanes of each run."""
        runs = {key: run.data(live) for key, run in zip(self.traces, self._runs)}
        return {"title": self.title, **arranged(runs, self._labels, self._select)}

    def text(self) -> str:
        """One line that says what is shown."""
        return f"{self.title}: collectives of {self.ranks()}{self.several()}"

    def words(self) -> str:
        """How long each rank waited and exchanged in each run."""
        tables = (heading(name) * (len(self._runs) > 1) + run.words()
                  for name, run in zip(names_of(self.traces), self._runs))
        return heading(self.title, self.sources()) + "".join(tables)


class CalledRun:
    """A recording as its picture needs it."""

    def __init__(self, trace: Trace):
        self.trace, self.timelines = trace, timelines_in(trace)
        found = [*visits(self.timelines)]
        most = max(1, MOST_BLOCKS // 3 // trace.world_size)
        self.visits = sorted(found, key=lambda visit: visit.start_s)[-most * trace.world_size:]
        self.window = self.visits[0].start_s, max(visit.end_s for visit in self.visits)
        if self.window[0] == self.window[1]:
            self.window = self.window[0], self.window[0] + 1e-9
        self.is_whole = len(found) == len(self.visits)
        self.places = {what: place for place, what in enumerate(dict.fromkeys(visit.what for visit in self.visits))}

    def data(self, live: bool) -> dict[str, Any]:
        """Lanes, stops, names and figures."""
        start_s, end_s = self.window
        lanes = [flat(blocks(self.visits, rank, self.places, self.window), self.window)
                 for rank in range(self.trace.world_size)]
        return {"source": origin(self.trace, with_backend=live), "duration_s": float(f"{end_s - start_s:.6g}"),
                "names": [*range(self.trace.world_size)], "called": self._names(), "lanes": lanes,
                "stops": [*self._stops()], "figures": self._figures()}

    def _names(self) -> list[list[str]]:
        """Of each collective the texts that may stand in its blocks."""
        told = groups_told(group for _, group in self.places)
        every = tuple(range(self.trace.world_size))
        return [[name] if group.ranks == every else [f"{name} of {told[group]}", name] for name, group in self.places]

    def _stops(self) -> Iterator[dict[str, Any]]:
        shown = in_seconds(self.window[1] - self.window[0], "ms")
        before, names = 0, self._names()
        waited, (most, least) = self._seconds(), self._most_and_least()
        yield {"t": 0, "say": [["", f"{'All' if self.is_whole else 'The last'} {shown} of the collectives."]]}
        met = defaultdict(list)
        for visit in self.visits:
            met[visit.what, visit.last_s].append(visit)
        for (what, last_s), some in sorted(met.items(), key=lambda one: one[0][1]):
            t = tick(last_s, self.window)
            if before < t < TICKS and len(some) > 1:
                before = t
                latest, waited_s = some[-1].rank, last_s - some[0].start_s
                yield {"t": t, "say": [[f"Rank {latest} comes last to {names[self.places[what]][0]}",
                                        f", {in_seconds(waited_s)} after the first."]]}
        yield {"t": TICKS, "say": [["", capitalised(self.trace.hangs.splitlines()[0]) if self.trace.hangs else
                                    f"Rank {most} has waited {in_seconds(waited[most][0])} for others, rank {least} "
                                    f"{in_seconds(waited[least][0])}."]]}

    def _figures(self) -> list[list[str]]:
        """How often each collective was called, with which bytes; who waited most and least."""
        found: dict[tuple[str, Group], list[float]] = defaultdict(list)
        for timeline in self.timelines:
            for row in timeline.calls:
                found[timeline.names[row["name"]], timeline.groups[row["group"]]].append(float(row["num_bytes"]))
        told = groups_told(group for _, group in found)
        rows = [[f"{round(len(sizes) / len(group.ranks))}×", f"{name} of {told[group]}, "
                 f"{in_bytes(sum(sizes) / len(group.ranks))} in a rank's tensors"]
                for (name, group), sizes in found.items()][:MOST_FIGURES]
        waited, (most, least) = self._seconds(), self._most_and_least()
        return [*rows, [in_seconds(waited[most][0]), f"rank {most} waits for others, the most of all"],
                [in_seconds(waited[least][0]), f"rank {least}, the least"]]

    def _most_and_least(self) -> tuple[int, int]:
        waited = [waits_s for waits_s, _ in self._seconds()]
        return waited.index(max(waited)), waited.index(min(waited))

    def _seconds(self) -> list[tuple[float, float]]:
        """By rank, for how long it waited for others, and exchanged."""
        return [(sum(one.moves_s - one.start_s for one in self.visits if one.rank == rank),
                 sum(one.end_s - one.moves_s for one in self.visits if one.rank == rank))
                for rank in range(self.trace.world_size)]

    def words(self) -> str:
        """A table for readers without JavaScript."""
        rows = [[f"rank {rank}", *map(in_seconds, both)] for rank, both in enumerate(self._seconds()[:MOST_RANKS])]
        called = [[count, what] for count, what in self._figures()[:-2]]
        return table(called) + table(rows, ["", "waits for others", "exchanges"])


def visits(timelines: Sequence[Timeline]) -> Iterator[Visit]:
    """Each rank's calls: the last rank to come is known from those with the same number in the same group."""
    last_s: dict[tuple[Group, int], float] = defaultdict(float)
    for timeline in timelines:
        for row in timeline.calls:
            key = timeline.groups[row["group"]], int(row["in_group"])
            last_s[key] = max(last_s[key], float(row["start_s"]))
    for timeline in timelines:
        for row in timeline.calls:
            group = timeline.groups[row["group"]]
            yield Visit(timeline.rank, (timeline.names[row["name"]], group), float(row["start_s"]),
                        float(row["end_s"]), last_s[group, int(row["in_group"])])


def blocks(found: Sequence[Visit], rank: int, places: Mapping[tuple[str, Group], int],
           window: tuple[float, float]) -> Blocks:
    """What a rank did: waits and exchanges, one after the other though calls overlap, and in between its own code."""
    drawn: Blocks = []
    until_s = window[0]
    for visit in found:
        if visit.rank != rank or visit.end_s <= until_s:
            continue
        number = len(KINDS) + 2 * places[visit.what]
        begin_s, moves_s = max(until_s, visit.start_s), max(until_s, visit.moves_s)
        drawn += [(PHASES.index(OTHER), until_s, begin_s), (number + WAITS, begin_s, moves_s),
                  (number + EXCHANGES, moves_s, visit.end_s)]
        until_s = visit.end_s
    drawn.append((PHASES.index(OTHER), until_s, window[1]))
    return [block for block in drawn if block[2] > block[1]]
