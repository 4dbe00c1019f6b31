"""L3: the picture of profiler traces: in one step what each stream of a GPU ran, and its host beside it.

Its script is that of `calls`, and its run is as there, with two things more: `kinds` has for each number in lanes what
that is and the texts of its blocks, and `idle` is what a lane does where it has no block. A lane's rank has its
names with it. Blocks of a stream may lie over one another, so ticks since the block before may be negative.
"""
from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from book.look.profiles import EXPOSED
from book.look.streams import BOTH, KINDS, WAITS, StreamBlock, StreamLane, StreamMoment, StreamShares, Streams
from book.widgets.calls import tick
from book.widgets.page import Page, arranged, heading, listed, table
from book.widgets.show import show
from book.widgets.terms import percent
from book.widgets.timeline import TICKS
from book.words import counted, in_seconds, named

if TYPE_CHECKING:
    from book.widgets.live import Live

MOST_NAMED = 16  # lanes that are high enough for a name each
MOST_NAME = 12  # characters of it: the rest is in what a pointer or a key asks for
MOST_NAMES = 3  # of a lane, in the table for readers without JavaScript
TITLE = "One step, stream by stream"


def step_streams(streams: Streams, *, title: str = TITLE, source: str = "as the profiler noted it"
                 ) -> StreamsView | Live:
    """What each stream of each rank ran in a step; `source` says where the trace is from."""
    return show(StreamsView(streams, title, source))


class StreamsView(Page):
    """The picture of a step of profiler traces."""

    widget = "calls"

    def __init__(self, streams: Streams, title: str = TITLE, source: str = "as the profiler noted it"):
        self.streams, self.title, self._source = streams, title, source
        self.traces = {}

    def with_trace(self, what: Any) -> StreamsView:
        """The same picture of other traces."""
        return StreamsView(what, self.title, self._source)

    def data(self, live: bool) -> dict[str, Any]:
        """Lanes and stops."""
        shown, numbers = self.streams, dict[tuple[str, ...], int]()
        rows = [_flat(lane, shown.duration_s, numbers) for lane in shown.lanes]
        run = {"source": self._source, "duration_s": float(f"{shown.duration_s:.6g}"), "names": _names(shown.lanes),
               "kinds": [list(texts) for texts in numbers], "idle": "idle", "lanes": rows,
               "stops": [*self._stops()], "figures": self._figures()}
        return {"title": self.title, **arranged({"": run}, None, None)}

    def _stops(self) -> Iterator[dict[str, Any]]:
        shown, ended = self.streams, defaultdict[int, list[list[str]]](list)
        clocks = "" if shown.one_clock else " No clocks are aligned: each rank begins at 0."
        left = f" Not drawn: {counted(shown.left_out, 'rank')} more." if shown.left_out else ""
        yield {"t": 0, "say": [["", f"{in_seconds(shown.duration_s)}: {shown.chosen}.{clocks}{left}"]]}
        for moment in shown.moments:
            ended[max(1, tick(moment.end_s, (0.0, shown.duration_s)))].append(moment_told(moment))
        ended[TICKS].append(["", " ".join(map(shares_told, self._told))])
        for t in sorted(ended):
            *others, last = ended[t]
            yield {"t": t, "say": [*([stress, f"{rest} "] for stress, rest in others), last]}

    @property
    def _told(self) -> list[StreamShares]:
        """The rank with the most exposed communication, and the late one."""
        shown = self.streams
        most = max(shown.shares, key=lambda one: (one.exposed_s, one.duration_s))
        return [most, *(one for one in shown.shares if one.rank == shown.late and one is not most)]

    def _figures(self) -> list[list[str]]:
        """Of the rank with the most exposed communication."""
        most = self._told[0]
        duration_s, of = most.duration_s, f"rank {most.rank}"
        found = [[percent(most.exposed_s / duration_s), f"of the time of {of} is {EXPOSED}"],
                 [percent(most.computing_s / duration_s), "computing"], [percent(most.idle_s / duration_s), "idle"]]
        if most.messages_s:
            found.insert(1, [percent(1 - most.exposed_s / most.messages_s), "of its communication is hidden"])
        if most.ahead_s is not None:
            found.append([in_seconds(most.ahead_s), "from a launch to its kernel, in the median"])
        return found

    def text(self) -> str:
        """One line that says what is shown."""
        return f"{self.title}: {counted(len(self.streams.lanes), 'lane')} of " + named(
            dict.fromkeys(lane.rank for lane in self.streams.lanes))

    def words(self) -> str:
        """What is told, and for each lane how long it did what, most in which names."""
        rows = []
        for lane in self.streams.lanes:
            sums = {kind: [block for block in lane.blocks if block.kind == kind] for kind in KINDS}
            parts = [f"{kind} {in_seconds(sum(block.busy_s for block in some))}: {_most(some)}"
                     for kind, some in sums.items() if some]
            rows.append([f"rank {lane.rank}, {lane.name}", "; ".join(parts) or "nothing"])
        told = ["".join("".join(part) for part in stop["say"]) for stop in self._stops()]
        return heading(self.title, self._source) + listed(told) + table(rows, ["lane", "most of its time"])


def moment_told(moment: StreamMoment) -> list[str]:
    """What to stress, and the rest."""
    lasts = in_seconds(moment.end_s - moment.start_s)
    if moment.name:
        return [f"Rank {moment.rank}: {lasts} of {moment.name}", ", exposed."]
    host = {"": "no operator or CUDA call is noted in most of it", BOTH: "the host is busy or waits for the GPU",
            WAITS: "the host stands in a call that waits for the GPU"}.get(moment.host, "the host is busy")
    said = f", and {in_seconds(moment.said_s)} of it are in {moment.said}" if moment.said else ""
    return [f"Rank {moment.rank} is idle for {lasts}", f"; {host}{said}."]


def shares_told(one: StreamShares) -> str:
    """Where the time of a rank went, as a sentence."""
    return (f"Rank {one.rank}: computing {in_seconds(one.computing_s)}, communication {in_seconds(one.messages_s)}, "
            f"{in_seconds(one.exposed_s)} of it exposed; idle {in_seconds(one.idle_s)}.")


def _names(lanes: Sequence[StreamLane]) -> list[list[Any]]:
    """Rank of each lane, its name beside it, and its whole one.

    Of several ranks the first lane names its rank, and where lanes are thin no other has a name.
    """
    ranks, before, found = {lane.rank for lane in lanes}, None, list[list[Any]]()
    for lane in lanes:
        is_first = len(ranks) > 1 and lane.rank != before
        name = lane.name if len(lane.name) <= MOST_NAME else f"{lane.name[:MOST_NAME - 1]}…"
        short = f"{lane.rank}: {name}" if is_first else name if len(lanes) <= MOST_NAMED else ""
        found.append([lane.rank, short, f"rank {lane.rank}, {lane.name}"])
        before = lane.rank
    return found


def _flat(lane: StreamLane, duration_s: float, numbers: dict[tuple[str, ...], int]) -> list[int]:
    """A lane's blocks as numbers; adds new kinds to `numbers`."""
    flat, before = [], 0
    for block in lane.blocks:
        start, end = (tick(time_s, (0.0, duration_s)) for time_s in (block.start_s, block.end_s))
        flat += [numbers.setdefault(_texts(block), len(numbers)), start - before, max(1, end - start)]
        before = start + max(1, end - start)
    return flat


def _texts(block: StreamBlock) -> tuple[str, ...]:
    """What a block is, and what may stand in it, long texts first."""
    if block.count == 1:
        return block.kind, block.name
    long = f"{block.count:,} in {in_seconds(block.busy_s)}, most of that in {block.name}"
    return block.kind, long, f"{block.count:,}× {block.name}", block.name, f"{block.count:,}×"


def _most(some: Sequence[StreamBlock]) -> str:
    """The names of which a lane has most."""
    found: dict[str, float] = {}
    for block in some:
        found[block.name] = found.get(block.name, 0.0) + block.busy_s
    return ", ".join(sorted(found, key=lambda name: -found[name])[:MOST_NAMES])
