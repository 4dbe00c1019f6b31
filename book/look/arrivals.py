"""L1: who comes last to the collectives of a job, from what its ranks have noted or from their profiler traces.

Wall times of forward and backward can't show a slow rank: in each collective all wait for the last, so all take equally
long. The one that comes last waits least. Clocks of hosts differ, and the collectives align them: none ends on any rank
before the last rank has come, and all end at about the same time.
"""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from book.look.profiles import Profile
from book.look.spans import length, union

# Chosen on 32 jobs with one slow rank, a slow link, jitter, or nothing of these; no job that tests them is among those.
SHARE, FOCUS, TRANSFER, SPREAD = 0.05, 0.7, 0.3, 0.14
FEWEST = 5  # collectives
RANK, LINK, JITTER, NOBODY = "rank", "link", "jitter", "nobody"


@dataclass(frozen=True)
class Arrivals:
    """When each rank came to each collective, and when that ended there, in seconds on one clock.

    A row is a collective, a column one of `ranks`; NaN where a rank is not in the group. `own_s` has such an array for
    each phase of the program: how long the rank was in it since it was released from the collective before. What is
    known begins with `begin_s`; None: with the first arrival.
    """

    ranks: tuple[int, ...]
    starts_s: np.ndarray
    ends_s: np.ndarray
    begin_s: float | None = None
    own_s: Mapping[str, np.ndarray] = field(default_factory=dict)

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

    @property
    def transfer_share(self) -> float:
        """The share of the time in which all had come and none was released."""
        rows = np.column_stack([np.nanmax(self.starts_s, axis=1), np.nanmin(self.ends_s, axis=1)])
        return length(union(rows[rows[:, 1] > rows[:, 0]])) / self.wall_s

    @property
    def late_position(self) -> int | None:
        """The position of the rank that others wait for over and over; None where none stands out."""
        lost = self.lost_s
        most = max(lost)
        return lost.index(most) if most > SHARE * self.wall_s and most > FOCUS * sum(lost) else None

    @property
    def cause(self) -> str:
        """What others wait for: one rank, a link, each rank in turn (jitter), or nobody."""
        if self.late_position is not None:
            return RANK
        if self.transfer_share > TRANSFER:
            return LINK
        return JITTER if sum(self.lost_s) > SPREAD * self.wall_s else NOBODY

    def excess_s(self, position: int) -> dict[str, float]:
        """By phase, how much longer a rank took than the others' median in all that it came last to."""
        rows = self.last == position
        found = {}
        for name, seconds in self.own_s.items():
            own, others = seconds[rows, position], np.delete(seconds[rows], position, axis=1)
            found[name] = float((own - np.nanmedian(others, axis=1)).sum())
        return found


def arrivals(profiles: Sequence[Profile]) -> Arrivals | None:
    """The arrivals of at least two ranks; None where their traces do not have the same collectives, or too few."""
    spans = [profile.arrivals for profile in profiles]
    num = len(spans[0]) if spans else 0
    if len(profiles) < 2 or num < FEWEST or any(len(some) != num for some in spans):
        return None
    starts, ends = (np.array([[span[which] for span in some] for some in spans]).T for which in (0, 1))
    offsets = [_offset_s(starts, ends, position) for position in range(len(profiles))]
    if None in offsets:
        return None
    ranks = tuple(position if profile.rank is None else profile.rank for position, profile in enumerate(profiles))
    return Arrivals(ranks, starts + offsets, ends + offsets)


def _offset_s(starts: np.ndarray, ends: np.ndarray, position: int) -> float | None:
    """What to add to a rank's clock to get the first one's; None where no number is right for these pairs of calls."""
    low = float((starts[:, 0] - ends[:, position]).max())  # neither's call ends before the other's has begun
    high = float((ends[:, 0] - starts[:, position]).min())
    return float(np.clip(np.median(ends[:, 0] - ends[:, position]), low, high)) if low <= high else None
