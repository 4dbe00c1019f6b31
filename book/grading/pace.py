"""L4: how long a grading run will still take, said only once that can be told."""
from __future__ import annotations

import time
from collections.abc import Callable
from threading import Lock

from book.words import counted

ROUND_S = 60


class Pace:
    """Counts submissions that were graded, apart from those that an earlier run had graded already."""

    def __init__(self, num_entries: int, num_jobs: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.num_left, self.num_jobs, self.clock = num_entries, num_jobs, clock
        self.num_graded, self.began_s, self.lock = 0, clock(), Lock()

    def begin(self) -> None:
        """The first submissions are graded from now on."""
        self.began_s = self.clock()

    def add(self, kept: bool) -> None:
        """One more is done; `kept` from an earlier run."""
        with self.lock:
            self.num_left -= 1
            self.num_graded += not kept

    def left_s(self) -> float | None:
        """Seconds until all are done; None before each of those graded side by side has been done once."""
        if self.num_graded < self.num_jobs:
            return None
        in_work = min(self.num_jobs, self.num_left)  # half done, on average
        each_s = (self.clock() - self.began_s) / (self.num_graded + in_work / 2)
        return max(0.0, (self.num_left - in_work / 2) * each_s)

    def words(self) -> str:
        """What is told: "about 14 minutes left"; "" as long as that is not known, and at the end."""
        left_s = self.left_s()
        if left_s is None or not self.num_left:
            return ""
        minutes = round(left_s / ROUND_S)
        return "less than a minute left" if minutes < 1 else f"about {counted(minutes, 'minute')} left"
