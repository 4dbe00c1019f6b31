"""L1: who comes last to the collectives of a job, from the profiler traces of its ranks.

Wall times of forward and backward can't show a slow rank: in each collective all wait for the last, so all take equally
long. The one that comes last waits least. Clocks of hosts differ, and the collectives align them: none ends on any rank
before the last rank has come, and all end at about the same time.
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from book.look.profiles import Profile, Span, length, union

SHARE, FOCUS = 0.05, 0.7  # chosen on 32 jobs with one slow rank, a slow link, jitter, or nothing of these
FEWEST = 5  # collectives


@dataclass(frozen=True)
class Arrivals:
    """When each rank came to each collective, and when that ended there, in seconds on the first one's clock.

    A row is a collective, a column one of `ranks`.
    """

    ranks: tuple[int, ...]
    starts_s: np.ndarray
    ends_s: np.ndarray

    @property
    def wall_s(self) -> float:
        """From the first arrival to the last end."""
        return float(self.ends_s.max() - self.starts_s.min())

    @property
    def last(self) -> np.ndarray:
        """Of each collective the position of the rank that came last."""
        return np.asarray(self.starts_s.argmax(axis=1))

    @property
    def lost_s(self) -> list[float]:
        """By position, for how long all others had come and waited for this rank alone.

        Collectives may be under way at once, as those of DDP's buckets are: time counts once.
        """
        second, last = np.sort(self.starts_s, axis=1)[:, -2:].T
        return [length(union(Span(begin, end, "") for begin, end in zip(second[own], last[own])))
                for own in (self.last == position for position in range(len(self.ranks)))]

    @property
    def late_position(self) -> int | None:
        """The position of the rank that others wait for over and over; None where none stands out."""
        lost = self.lost_s
        most = max(lost)
        return lost.index(most) if most > SHARE * self.wall_s and most > FOCUS * sum(lost) else None


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
