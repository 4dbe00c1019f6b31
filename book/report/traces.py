"""L3: this book's own traces, recorded or simulated, as what ranks have noted, and in words."""
from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from itertools import count

from book.look.arrivals import Arrivals
from book.look.timelines import Timeline, timeline
from book.look.told import timelines_told
from book.trace import Event, Trace
from book.waiting.hang import Group
from book.words import counted

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


def timelines_of(found: Arrivals) -> list[Timeline]:
    """The collectives that profiler traces have in common."""
    group = Group("", tuple(sorted(found.ranks)))
    return [timeline(rank, [("collective", group, number, start_s, end_s, 0.0) for number, (start_s, end_s) in
                            enumerate(zip(found.starts_s[:, place], found.ends_s[:, place]), 1)])
            for place, rank in enumerate(found.ranks)]


def _with_times(trace: Trace) -> Iterator[Event]:
    return (event for event in trace.events if event.kind in SHOWN and event.start_s is not None
            and event.end_s is not None)


def trace_told(trace: Trace) -> Iterator[str]:
    """What the trace is of, what its ranks called, and who was late."""
    name = f"{trace.name}: " if trace.name else ""
    backend = f" on {trace.backend}" if trace.backend else ""
    yield f"{name}a trace of {counted(trace.world_size, 'rank')}, {trace.source}{backend}, {trace.clock} times"
    called = Counter(event.kind if event.kind != "collective" else event.op or event.kind
                     for event in trace.events if event.kind in SHOWN)
    yield f"  all ranks together: {', '.join(f'{name} {num}' for name, num in called.most_common()) or 'no calls'}"
    yield from (f"  {line}" for line in (trace.hangs or "").splitlines())
    if trace.clock == "measured":
        yield from (f"  {line}" for line in timelines_told(timelines_in(trace)))
