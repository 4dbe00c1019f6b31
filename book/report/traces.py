"""L3: traces and Flight Recorder dumps as what ranks have noted; this book's own traces in words."""
from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence

from book.look.arrivals import Arrivals
from book.look.flights import FlightDump, waits
from book.look.recorded import SHOWN, timelines_in
from book.look.timelines import ORIGIN_S, Timeline, timeline
from book.look.told import timelines_told
from book.trace import Trace
from book.waiting.hang import Group
from book.waiting.standstill import Common
from book.words import counted

LAST = 6  # collectives of a rank that are shown before those that are not done


def timelines_of(found: Arrivals) -> list[Timeline]:
    """The collectives that profiler traces have in common."""
    group = Group("", tuple(sorted(found.ranks)))
    return [timeline(rank, [("collective", group, number, start_s, end_s, 0.0) for number, (start_s, end_s) in
                            enumerate(zip(found.starts_s[:, place], found.ends_s[:, place]), 1)])
            for place, rank in enumerate(found.ranks)]


def timelines_of_dumps(flights: Sequence[FlightDump]) -> tuple[list[Timeline], float, Common | None]:
    """Each rank's last collectives; when all had made the one before that in which ranks wait, and which it was.

    Times are by hosts' clocks. No dump says when a call was over. It was not before the last of its ranks had come,
    which is when it ends here.
    Nothing where no rank waits, or where the dumps have no times.
    """
    stuck, calls = waits(flights), [call for flight in flights for call in flight.calls]
    if not stuck or not all(call.time_ns for call in calls):
        return [], 0.0, None
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
        return found, 0.0, None
    return (found, ORIGIN_S + (came_ns[group, before] - first_ns) / 1e9,
            Common(Group(group, tuple(flight.rank for flight in flights)), before, common[0].what))


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
