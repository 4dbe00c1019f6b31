"""L1: what ranks have noted of a run on one clock: their calls, and the phases of the program around them.

A rank is released from a collective at the end of its wait for it, or, where DDP waits in C++, of the backward around
it. From one release to its last call before the next one, its time was its own; from that call on it waits, and for
how long says nothing about itself.
"""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from book.look.arrivals import Arrivals
from book.look.spans import common, covered_s, length, less, union
from book.waiting.hang import Group

INPUT, FORWARD, BACKWARD, OPTIMIZER, COLLECTOR, OTHER = PHASES = (
    "input", "forward", "backward", "optimizer", "garbage collector", "other code")
# In a program that nests them, such as an optimizer's closure that runs forward, the first of these is meant.
INNER_FIRST = (COLLECTOR, INPUT, FORWARD, BACKWARD, OPTIMIZER)
ROW = np.dtype([("number", "<u8"), ("start_s", "<f8"), ("waits_s", "<f8"), ("end_s", "<f8"), ("name", "<u4"),
                ("group", "<u4"), ("in_group", "<u8"), ("num_bytes", "<u8")])
NUM_ROWS = 1 << 14  # of calls that a rank remembers, and as many of phases: 1.8 MB
NUM_BYTES = 2 * NUM_ROWS * ROW.itemsize
ORIGIN_S = 1.0  # where clocks from elsewhere begin: here 0 stands for a time that is not known
FEWEST = 5  # exchanges that a verdict needs
WARM_UP = 3  # exchanges that are left out where there are no steps


@dataclass(frozen=True)
class Timeline:
    """One rank's notes; times in seconds, by a clock that is the same for all ranks.

    A row of `calls` is an operation of a backend: its `number` in the process, when it was called, since when the
    program waited for it and until when (0: it did not, or is not done), places in `names` and `groups`, its number
    in the group, and bytes. A row of `phases` has a name, a start and an end (0: not over). Old rows are forgotten.
    """

    rank: int
    names: tuple[str, ...]
    groups: tuple[Group, ...]
    calls: np.ndarray
    phases: np.ndarray
    on_gpu: bool = False  # then the host's calls return before the collectives run

    @property
    def collectives(self) -> np.ndarray:
        """The calls that are no sends or receives."""
        messages = [number for number, name in enumerate(self.names) if name in ("send", "recv")]
        return self.calls[~np.isin(self.calls["name"], messages)]

    def phase(self, name: str, until_s: float | None = None) -> np.ndarray:
        """When a phase ran: rows (start, end), ascending, which do not touch; `until_s` if its last one is not over."""
        rows = self._phase(name)
        found = np.column_stack([rows["start_s"], rows["end_s"]])
        last = self._phase(name, over=False)[-1:]
        if until_s is not None and len(last) and last["end_s"][0] == 0:
            found = np.concatenate([found, [[last["start_s"][0], until_s]]])
        return union(found)

    @property
    def step_starts_s(self) -> np.ndarray:
        """When each step of an optimizer began, or, without one, each backward.

        Of several optimizers, one after the other with no backward between them, the first one's.
        """
        steps, backwards = (np.sort(self._phase(name)["start_s"]) for name in (OPTIMIZER, BACKWARD))
        if not len(steps) or not len(backwards):
            return steps if len(steps) else backwards
        before = np.searchsorted(backwards, steps)
        return steps[np.append(True, before[1:] > before[:-1])]

    def _phase(self, name: str, over: bool = True) -> np.ndarray:
        if name not in self.names:
            return self.phases[:0]
        return self.phases[(self.phases["name"] == self.names.index(name)) & ((self.phases["end_s"] > 0) | (not over))]

    @property
    def waits(self) -> np.ndarray:
        """When the program waited in communication: rows (start, end), ascending, which do not touch."""
        return self._waits(self.calls, self.cuts)

    def waits_in(self, group: Group) -> np.ndarray:
        """The same of one group."""
        return self._waits(*(rows[rows["group"] == self.groups.index(group)] for rows in (self.calls, self.cuts)))

    def _waits(self, calls: np.ndarray, cuts: np.ndarray) -> np.ndarray:
        known = calls[(calls["waits_s"] > 0) & (calls["end_s"] > 0)]
        hidden = cuts[cuts["in_backward"]]  # the waits of DDP
        return union(np.concatenate([np.column_stack([known["waits_s"], known["end_s"]]),
                                     np.column_stack([hidden["arrival_s"], hidden["release_s"]])]))

    @property
    def cuts(self) -> np.ndarray:
        """A row for each release: since when the time was the rank's own, its last call, and when it was released."""
        calls, ends = self.collectives, np.sort(self.phase(BACKWARD)[:, 1])
        next_end = np.searchsorted(ends, calls["start_s"], "right")
        hidden = (calls["end_s"] == 0) & (next_end < len(ends))
        released = np.where(hidden, np.append(ends, 0)[next_end], calls["end_s"])
        order = np.lexsort((calls["start_s"], released))[np.count_nonzero(released == 0):]
        releases = released[order]
        last = np.append(releases[1:] != releases[:-1], True)[:len(order)]
        found = np.zeros(int(last.sum()), CUT)
        rows = order[last]
        found["release_s"], found["arrival_s"], found["in_backward"] = released[rows], calls["start_s"][rows], hidden[
            rows]
        found["group"], found["in_group"] = calls["group"][rows], calls["in_group"][rows]
        found["begin_s"][1:] = found["release_s"][:-1]
        found["begin_s"][:1] = np.inf  # nothing is known of the time before
        return found

    def own_s(self, begins_s: np.ndarray, arrivals_s: np.ndarray) -> dict[str, np.ndarray]:
        """By phase the rank's own time between each begin and arrival."""
        found, before, rest = {}, np.zeros((0, 2)), arrivals_s - begins_s
        for name in INNER_FIRST:
            rows = less(self.phase(name), before)
            before = union(np.concatenate([before, rows]))
            found[name] = covered_s(rows, arrivals_s) - covered_s(rows, begins_s)
            rest = rest - found[name]
        return {name: found.get(name, rest) for name in PHASES}


def timeline_of(rank: int, memory: Any, names: tuple[str, ...], groups: tuple[Group, ...], on_gpu: bool) -> Timeline:
    """What a ring holds, with what its numbers stand for."""
    rows = np.frombuffer(memory, ROW)
    calls, phases = _ring_rows(rows[:NUM_ROWS]), _ring_rows(rows[NUM_ROWS:])
    # A rank that was killed may not have told of a name or a group that it had just begun to use.
    calls = calls[(calls["name"] < len(names)) & (calls["group"] < len(groups))]
    return Timeline(rank, names, groups, calls, phases[phases["name"] < len(names)], on_gpu)


def _ring_rows(ring: np.ndarray) -> np.ndarray:
    """The rows of a ring, oldest first, without those that the others have gone round."""
    rows = np.sort(ring[ring["number"] > 0], order="number")
    return rows[rows["number"] + len(ring) > rows["number"][-1]] if len(rows) else rows


def timeline(rank: int, calls: Sequence[tuple[str, Group, int, float, float | None, float]],
             on_gpu: bool = False) -> Timeline:
    """Calls known from elsewhere: name, group, number in it, start and end in seconds, bytes.

    From start to end the rank waited; without an end it still does. On a GPU the host waited in none that is done.
    """
    names, groups = tuple(dict.fromkeys(call[0] for call in calls)), tuple(dict.fromkeys(call[1] for call in calls))
    rows = np.zeros(len(calls), ROW)
    for row, (name, group, number, start_s, end_s, num_bytes) in enumerate(calls):
        done, start_s = end_s is not None, start_s + ORIGIN_S
        until_s = end_s + ORIGIN_S if end_s is not None and not on_gpu else 0.0
        rows[row] = (row + 1, start_s, 0.0 if done and on_gpu else start_s, until_s, names.index(name),
                     groups.index(group), number, num_bytes)
    return Timeline(rank, names, groups, rows, rows[:0], on_gpu)


CUT = np.dtype([("begin_s", "<f8"), ("arrival_s", "<f8"), ("release_s", "<f8"), ("in_backward", "?"), ("group", "<u4"),
                ("in_group", "<u8")])


def arrivals_of(timelines: Sequence[Timeline]) -> Arrivals | None:
    """When ranks came to what they exchanged, once each has made a step; None for too few exchanges of two ranks.

    A row is a call that was the last before a release on each rank of its group.
    """
    cuts = [{group: some[some["group"] == place] for place, group in enumerate(timeline.groups)}
            for timeline in timelines for some in [_in_order(timeline.cuts)]]
    parts = [_part(timelines, cuts, group) for group in dict.fromkeys(
        group for timeline in timelines for group in timeline.groups)]
    parts = [part for part in parts if part is not None]
    if not parts:
        return None
    whole: dict[str, np.ndarray] = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    order = np.argsort(np.nanmax(whole["starts_s"], axis=1), kind="stable")
    warm = _warm_s(timelines)
    order = order[WARM_UP:] if warm is None else order[np.nanmax(whole["starts_s"][order], axis=1) > warm]
    if len(order) < FEWEST:
        return None
    rows = {name: some[order] for name, some in whole.items()}
    return Arrivals(tuple(timeline.rank for timeline in timelines), rows["starts_s"], rows["ends_s"],
                    float(np.nanmin(rows["begins_s"])), {name: rows[name] for name in PHASES})


def _in_order(cuts: np.ndarray) -> np.ndarray:
    """Without those whose call came before the release of another."""
    return cuts[cuts["arrival_s"] > cuts["begin_s"]]


def _part(timelines: Sequence[Timeline], cuts: Sequence[Mapping[Group, np.ndarray]],
          group: Group) -> dict[str, np.ndarray] | None:
    """The exchanges of one group, by what is known of them: a row for each, a column for each rank, NaN outside it."""
    members = [position for position, timeline in enumerate(timelines)
               if timeline.rank in group.ranks and group in timeline.groups]
    if len(members) < 2:
        return None
    numbers = cuts[members[0]][group]["in_group"]
    for position in members[1:]:
        numbers = np.intersect1d(numbers, cuts[position][group]["in_group"])
    found = {name: np.full((len(numbers), len(timelines)), np.nan) for name in ("begins_s", "starts_s", "ends_s",
                                                                               *PHASES)}
    for position in members:
        some = cuts[position][group]
        some = some[np.argsort(some["in_group"], kind="stable")]
        some = some[np.searchsorted(some["in_group"], numbers)]
        columns = {"begins_s": some["begin_s"], "starts_s": some["arrival_s"], "ends_s": some["release_s"],
                   **timelines[position].own_s(some["begin_s"], some["arrival_s"])}
        for name, column in columns.items():
            found[name][:, position] = column
    return found


def _warm_s(timelines: Sequence[Timeline]) -> float | None:
    """When the last rank had begun its first step; None if one has made none."""
    starts = [timeline.step_starts_s for timeline in timelines]
    return max(float(some[0]) for some in starts) if all(map(len, starts)) else None


@dataclass(frozen=True)
class Steps:
    """How many steps ranks remember, from the start of one to that of the next, and the median of their seconds."""

    num: int
    median_s: float
    whole: bool  # whether these are all but the first


def steps(timelines: Sequence[Timeline]) -> Steps | None:
    """The steps that ranks remember; None for fewer than two."""
    lengths = [np.diff(timeline.step_starts_s) for timeline in timelines]
    num = min(map(len, lengths), default=0)
    if not num:
        return None
    return Steps(num, float(np.median(np.concatenate(lengths))),
                 all(timeline.phases["number"][0] == 1 for timeline in timelines))


def waiting_shares(timelines: Sequence[Timeline], found: Arrivals) -> list[float]:
    """By position the share of the time in which a rank waited in communication, for others or for bytes."""
    window = np.array([[found.since_s, found.until_s]])
    return [length(common(timeline.waits, window)) / found.wall_s for timeline in timelines]


@dataclass(frozen=True)
class ExposedWaits:
    """Seconds of the median step in which a rank did nothing but wait in communication.

    `by_rank` has them by position; `by_group` of each group the rank that waits longest in its calls, and how long.
    """

    by_rank: tuple[float, ...]
    by_group: Mapping[Group, tuple[int, float]]


def exposed_waits(timelines: Sequence[Timeline]) -> ExposedWaits | None:
    """The exposed communication of a step; None where a rank remembers no two steps."""
    if steps(timelines) is None:
        return None
    by_group: dict[Group, tuple[int, float]] = {}
    for timeline in timelines:
        for group in timeline.groups:
            seconds = _in_a_step_s(timeline, timeline.waits_in(group))
            if group not in by_group or seconds > by_group[group][1]:
                by_group[group] = timeline.rank, seconds
    return ExposedWaits(tuple(_in_a_step_s(timeline, timeline.waits) for timeline in timelines), by_group)


def _in_a_step_s(timeline: Timeline, rows: np.ndarray) -> float:
    """How much of a step rows cover, in the median."""
    return float(np.median(np.diff(covered_s(rows, timeline.step_starts_s))))
