"""L1: who comes last to the collectives of a job, from what its ranks have noted or from their profiler traces.

Wall times of forward and backward can't show a slow rank: in each collective all wait for the last, so all take equally
long. The one that comes last waits least. Clocks of hosts differ, and the collectives align them: none ends on any rank
before the last rank has come, and all end at about the same time.
"""
from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from book.look.profiles import Interval, Profile, short_name
from book.look.spans import length, union

# Chosen on 32 jobs with one slow rank, a slow link, jitter, or nothing of these; no job that tests them is among those.
SHARE, FOCUS, TRANSFER, SPREAD = 0.05, 0.7, 0.3, 0.14
OWN = 0.3  # of what is lost to a late rank, that its longer own time has to explain; asked only where that is known
FEWEST = 5  # collectives
TOGETHER_S = 1e-3  # within which a collective ends on all ranks
MOST_COMPARED = 400  # collectives of a kind of two ranks, of which all pairs are looked at
RANK, LINK, JITTER, NOBODY = "rank", "link", "jitter", "nobody"


@dataclass(frozen=True)
class Arrivals:
    """When each rank came to each collective, and when that ended there, in seconds on one clock.

    A row is a collective, a column one of `ranks`; NaN where a rank is not in the group. `own_s` has such an array for
    each phase of the program: how long the rank was in it since it was released from the collective before. What is
    known begins with `begin_s`; None: with the first arrival. `left_out` is how many collectives of each rank are in no
    row, because others do not have them. `offsets_s` is what was added to each rank's own clock.
    """

    ranks: tuple[int, ...]
    starts_s: np.ndarray
    ends_s: np.ndarray
    begin_s: float | None = None
    own_s: Mapping[str, np.ndarray] = field(default_factory=dict)
    left_out: tuple[int, ...] = ()
    offsets_s: tuple[float, ...] = ()

    @property
    def since_s(self) -> float:
        """The beginning of what is known."""
        return float(np.nanmin(self.starts_s)) if self.begin_s is None else self.begin_s

    @property
    def until_s(self) -> float:
        """The last end."""
        return float(np.nanmax(self.ends_s))

    @property
    def wall_s(self) -> float:
        """How much time is known."""
        return self.until_s - self.since_s

    @property
    def last(self) -> np.ndarray:
        """Of each collective the position of the rank that came last."""
        return np.asarray(np.nanargmax(self.starts_s, axis=1))

    @property
    def lost_s(self) -> list[float]:
        """By position, for how long all others had come and waited for this rank alone.

        Collectives may be under way at once, as those of DDP's buckets are: time counts once.
        """
        rows, last = np.sort(np.nan_to_num(self.starts_s, nan=-np.inf), axis=1)[:, -2:], self.last
        return [length(union(rows[last == position])) for position in range(len(self.ranks))]

    def longest_s(self, position: int) -> float:
        """For how long all others waited for a rank in the one collective in which they did so longest."""
        rows = np.sort(np.nan_to_num(self.starts_s[self.last == position], nan=-np.inf), axis=1)[:, -2:]
        return float((rows[:, 1] - rows[:, 0]).max(initial=0.0))

    @property
    def transfer_share(self) -> float:
        """The share of the time in which all had come and none was released."""
        rows = np.column_stack([np.nanmax(self.starts_s, axis=1), np.nanmin(self.ends_s, axis=1)])
        return length(union(rows[rows[:, 1] > rows[:, 0]])) / self.wall_s

    @property
    def late_position(self) -> int | None:
        """The position of the rank that others wait for over and over; None where none stands out.

        Where ranks' own time is known, which it is not of profiler traces, a rank is late only if its longer own time
        explains at least OWN of what the others lose to it. Else a slow link has released it later.
        """
        position = self.awaited
        return None if position is None or self._is_released_late(position) else position

    @property
    def awaited(self) -> int | None:
        """The position of the rank that others wait for over and over, whether by its own time or not."""
        lost = self.lost_s
        most = max(lost)
        return lost.index(most) if most > SHARE * self.wall_s and most > FOCUS * sum(lost) else None

    def _is_released_late(self, position: int) -> bool:
        return bool(self.own_s) and sum(self.excess_s(position).values()) < OWN * self.lost_s[position]

    @property
    def cause(self) -> str:
        """What others wait for: one rank, a link, each rank in turn (jitter), or nobody."""
        if self.late_position is not None:
            return RANK
        if self.transfer_share > TRANSFER or self.awaited is not None:
            return LINK
        return JITTER if sum(self.lost_s) > SPREAD * self.wall_s else NOBODY

    def excess_s(self, position: int) -> dict[str, float]:
        """By phase, how much longer a rank took than the others' median in all that it came last to.

        What is not known of it, or of all others, counts as 0.
        """
        rows = self.last == position
        found = {}
        for name, seconds in self.own_s.items():
            own, others = seconds[rows, position], np.delete(seconds[rows], position, axis=1)
            known = ~(np.isnan(own) | np.isnan(others).all(axis=1))
            found[name] = float((own[known] - np.nanmedian(others[known], axis=1)).sum())
        return found


def arrivals(profiles: Sequence[Profile]) -> Arrivals | None:
    """The arrivals of at least two ranks at the collectives that are in all traces; None where these are too few.

    They are those of the groups and operations that all traces have equally many of, in order, or, where that can't be
    right, those that end at the same time.
    """
    spans = [profile.arrivals for profile in profiles]
    if len(profiles) < 2 or min(map(len, spans)) < FEWEST:
        return None
    found = _aligned(spans, _by_order(spans)) or _aligned(spans, _by_ends(spans))
    if not found:
        return None
    starts, ends, offsets = found
    ranks = tuple(position if profile.rank is None else profile.rank for position, profile in enumerate(profiles))
    return Arrivals(ranks, starts, ends, left_out=tuple(len(some) - len(starts) for some in spans),
                    offsets_s=offsets)


def _aligned(spans: Sequence[Sequence[Interval]],
             rows: Sequence[Sequence[int]]) -> tuple[np.ndarray, np.ndarray, tuple[float, ...]] | None:
    """Starts and ends of these collectives, places in each rank's list, on the first rank's clock; None for too few.

    Then what was added to each rank's clock.
    """
    if len(rows) < FEWEST:
        return None
    starts, ends = (np.array([[span[place][which] for span, place in zip(spans, row)] for row in rows])
                    for which in (0, 1))
    offsets = [_offset_s(starts, ends, position) for position in range(len(spans))]
    known = tuple(offset for offset in offsets if offset is not None)
    return (starts + known, ends + known, known) if len(known) == len(offsets) else None


def _by_kind(some: Sequence[Interval]) -> dict[tuple[str, str], list[int]]:
    """Places in a rank's list, by group and operation."""
    found = defaultdict(list)
    for place, span in enumerate(some):
        found[span.group, short_name(span.name)].append(place)
    return found


def _by_order(spans: Sequence[Sequence[Interval]]) -> list[tuple[int, ...]]:
    """The first with the first, and so on, of each group and operation of which all ranks have equally many."""
    first, *others = [_by_kind(some) for some in spans]
    return sorted(row for kind, places in first.items() if all(len(other.get(kind, ())) == len(places)
                                                               for other in others)
                  for row in zip(places, *(other[kind] for other in others)))


def _by_ends(spans: Sequence[Sequence[Interval]]) -> list[tuple[int, ...]]:
    """Those that end together on all ranks, by the clocks' offset at which most do; none if these are under half."""
    first, *others = [[(np.array([some[place].end_s for place in places]), np.array(places)) for places in (
        _by_kind(some).get(kind, []) for kind in _by_kind(spans[0]))] for some in spans]
    partners = [_ending_together(first, other) for other in others]
    if any(2 * len(each) < min(len(spans[0]), len(some)) for each, some in zip(partners, spans[1:])):
        return []
    return [(here, *(each[here] for each in partners)) for here in range(len(spans[0]))
            if all(here in each for each in partners)]


Ends = Sequence[tuple[np.ndarray, np.ndarray]]  # of each kind of collective: when they end, and their places


def _ending_together(first: Ends, other: Ends) -> dict[int, int]:
    """Places in one rank's list, and those in the other's that end at the same time."""
    apart = np.sort(np.concatenate([np.subtract.outer(here[:MOST_COMPARED], there[:MOST_COMPARED]).ravel()
                                    for (here, _), (there, _) in zip(first, other)]))
    if not len(apart):
        return {}
    together = np.searchsorted(apart, apart + TOGETHER_S) - np.searchsorted(apart, apart - TOGETHER_S)
    offset_s = apart[together.argmax()]
    found: dict[int, int] = {}
    for (here_s, here), (there_s, there) in zip(first, other):
        if len(here) and len(there):
            order = np.argsort(there_s)
            edges = (there_s[order][1:] + there_s[order][:-1]) / 2
            nearest = order[np.searchsorted(edges, here_s - offset_s)]
            near = np.abs(here_s - offset_s - there_s[nearest]) < TOGETHER_S
            found |= dict(zip(there[nearest[near]].tolist(), here[near].tolist()))
    return {place: partner for partner, place in found.items()}


def _offset_s(starts: np.ndarray, ends: np.ndarray, position: int) -> float | None:
    """What to add to a rank's clock to get the first one's; None where no number is right for these pairs of calls."""
    low = float((starts[:, 0] - ends[:, position]).max())  # neither's call ends before the other's has begun
    high = float((ends[:, 0] - starts[:, position]).min())
    return float(np.clip(np.median(ends[:, 0] - ends[:, position]), low, high)) if low <= high else None
