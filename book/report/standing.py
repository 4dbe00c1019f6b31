"""L3: a job's hang for its page: where its picture opens, and what Flight Recorder dumps know of who waits for whom."""
from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from book.look.flights import Due, FlightDump, Wait, waits
from book.look.runs import JobRun
from book.look.timelines import Timeline
from book.waiting.standstill import UNKNOWN, WAITS, Common, Stand, Standstill, WaitFor, doings_told
from book.words import named

MOST_RANKS = 4096  # that are told of without a dump: a number in a file's name may be no rank
Moment = tuple[float, str]  # seconds on a timeline's clock, and what is to be said then


def common_of(run: JobRun) -> Moment | None:
    """When the ranks of a hang had made their last call together, and what each does since."""
    if run.standstill is None or run.standstill.common is None:
        return None
    common = run.standstill.common
    calls = [row for each in run.timelines for row in _calls(each, common)]
    if len(calls) < len(common.group.ranks):
        return None  # a rank has forgotten it, or has left no notes
    ends_s = [float(row["end_s"]) for row in calls]
    came_s = max(float(row["start_s"]) for row in calls)
    return max([came_s, *ends_s]), common_told(run.standstill)


def _calls(timeline: Timeline, common: Common) -> np.ndarray:
    """A rank's call that is the last one which all had made."""
    places = [place for place, group in enumerate(timeline.groups) if group == common.group]
    rows = timeline.collectives
    return rows[np.isin(rows["group"], places) & (rows["in_group"] == common.number)]


def common_told(found: Standstill) -> str:
    """What all had done, and what each does since."""
    assert found.common is not None
    group, number, what = found.common
    return (f"Here {named(group.ranks)} had made call {number} of their group, {what}, and no later one together. "
            f"Since then: {doings_told(found.stands)}.")


def standstill_of(flights: Sequence[FlightDump], common: Common | None) -> Standstill:
    """Who waits for whom, as dumps show it: they know calls, and nothing of what a rank does between them."""
    by_rank = {flight.rank: flight for flight in flights}
    does: dict[int, tuple[str, str, str]] = {}
    found: dict[int, list[WaitFor]] = defaultdict(list)
    for wait in waits(flights):
        on_time = tuple(sorted(wait.calls.keys() - set(wait.late)))
        for rank, call in sorted(wait.calls.items()):
            if rank in wait.late and wait.due is Due.NOT_STARTED:
                begun = f"has made call {wait.number}, and its GPU has not begun it"
                does.setdefault(rank, (UNKNOWN, begun, call.line))
                continue
            does[rank] = WAITS, f"waits in call {wait.number}, {call.what}", call.line
            others = on_time if rank in wait.late else wait.late
            found[rank] += [WaitFor(call.op, others)] if others else []
        for rank in wait.late:
            does.setdefault(rank, _instead(by_rank.get(rank), wait))
    ranks = does.keys() | by_rank.keys() | {rank for flight in flights for call in flight.calls for rank in call.ranks}
    ranks |= set(range(min(MOST_RANKS, max(flight.world_size for flight in flights))))
    return Standstill(tuple(Stand(rank, *does.get(rank, _rest(rank in by_rank)), tuple(found[rank]))
                            for rank in sorted(ranks)), common)


def _rest(has_dump: bool) -> tuple[str, str, str]:
    """What is known of a rank that neither waits nor is waited for."""
    return UNKNOWN, "has done all calls of its dump" if has_dump else "has left no dump", ""


def _instead(flight: FlightDump | None, wait: Wait) -> tuple[str, str, str]:
    """What is known of a rank that is waited for: its state, words and line."""
    if flight is None:
        return UNKNOWN, "has left no dump: it is dead, stopped, or holds the interpreter lock", ""
    last = flight.last(wait.group)
    if last is None or last.peer is not None or any(call.peer is not None for call in wait.calls.values()):
        return UNKNOWN, "has no such call under way", ""
    return UNKNOWN, f"has not made call {wait.number}; its last is call {last.number}, {last.what}", last.line
