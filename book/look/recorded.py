"""L1: this book's own traces as what ranks have noted of their calls."""
from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from itertools import count

from book.look.timelines import Timeline, timeline
from book.trace import Event, Trace
from book.waiting.hang import Group

SHOWN = ("send", "recv", "collective")


def timelines_in(trace: Trace) -> list[Timeline]:
    """The calls of each rank, if the trace has times for them; a rank waits in each from its start to its end."""
    calls: list[list[tuple[str, Group, int, float, float, float]]] = [[] for _ in range(trace.world_size)]
    numbers: dict[tuple[int, Group], Iterator[int]] = defaultdict(lambda: count(1))
    for event in sorted(_with_times(trace), key=lambda event: event.times_s):
        group = Group("", event.group or tuple(sorted({event.rank, event.peer or 0})))
        name = event.kind if event.kind != "collective" else event.op or event.kind
        calls[event.rank].append((name, group, next(numbers[event.rank, group]), *event.times_s, event.num_bytes or 0))
    return [timeline(rank, each) for rank, each in enumerate(calls)] if any(calls) else []


def _with_times(trace: Trace) -> Iterator[Event]:
    return (event for event in trace.events if event.kind in SHOWN and event.start_s is not None
            and event.end_s is not None)
