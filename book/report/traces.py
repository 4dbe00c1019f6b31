"""L3: traces and Flight Recorder dumps as what ranks have noted; this book's own traces in words."""
from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from itertools import count

from book.look.arrivals import Arrivals
from book.look.flights import FlightDump, waits
from book.look.timelines import ORIGIN_S, Timeline, timeline
from book.look.told import timelines_told
from book.trace import Event, Trace
from book.waiting.hang import Group
from book.words import counted

SHOWN = ("send", "recv", "collective")
LAST = 6  # collectives of a rank that are shown before those that are not done
Moment = tuple[float, str]  # seconds on a timeline's clock, and what is to be said then


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


def timelines_of_dumps(flights: Sequence[FlightDump]) -> tuple[list[Timeline], list[Moment]]:
    """Each rank's last collectives, and when all had made the one before that in which ranks wait; by hosts' clocks.

    No dump says when a call was over. It was not before the last of its ranks had come, which is when it ends here.
    Nothing where no rank waits, or where the dumps have no times.
    """
    stuck, calls = waits(flights), [call for flight in flights for call in flight.calls]
    if not stuck or not all(call.time_ns for call in calls):
        return [], []
    first_ns, came_ns = min(call.time_ns for call in calls), defaultdict[tuple[str, int], int](int)
    for call in calls:
        came_ns[call.group, call.number] = max(came_ns[call.group, call.number], call.time_ns)
    found = []
    for flight in flights:
        shown = [call for call in flight.calls if call.done][-LAST:] + [call for call in flight.calls if not call.done]
        rows = [(call.op, Group(call.group, call.ranks), call.number, (call.time_ns - first_ns) / 1e9,
                 (came_ns[call.group, call.number] - first_ns) / 1e9 if call.done else None, float(call.num_bytes))
                for call in shown]
        found.append(timeline(flight.rank, rows, on_gpu=flight.backend == "nccl"))
    group, before = stuck[0].group, stuck[0].number - 1
    common = [call for flight in flights if (call := flight.at(group, before))]
    if len(common) < len(flights):
        return found, []
    return found, [(ORIGIN_S + (came_ns[group, before] - first_ns) / 1e9,
                    f"Here all of these ranks had made call {before}, {common[0].what}.")]


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
