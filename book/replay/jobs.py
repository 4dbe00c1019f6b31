"""L2: what training steps show of a job: who comes last where all ranks meet, by how much, and in which phase."""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from book.look.arrivals import Arrivals
from book.replay.steps import RankPhase, steps_of
from book.trace import Trace


@dataclass(frozen=True)
class SyncPoint:
    """Where all ranks meet: for each rank when it comes to the last all-reduce of a block and when it leaves the block;
    `name` is what the block is called."""

    name: str
    come_s: np.ndarray
    left_s: np.ndarray

    @property
    def last(self) -> int:
        """The rank that comes last."""
        return int(self.come_s.argmax())

    @property
    def late_s(self) -> float:
        """By how much the last rank comes after the one before it."""
        return float(np.diff(np.sort(self.come_s)[-2:])[0]) if len(self.come_s) > 1 else 0.0

    @property
    def end_s(self) -> float:
        """When all have left."""
        return float(self.left_s.max())

    @property
    def moving_s(self) -> float:
        """How long it takes once all have come."""
        return self.end_s - float(self.come_s.max())


@dataclass(frozen=True)
class RecordedJob:
    """The blocks of each rank, and where the ranks meet; all times in seconds, of the whole trace."""

    programs: list[list[RankPhase]]
    meetings: list[SyncPoint]

    @property
    def start_s(self) -> float:
        """When the first phase begins."""
        return min(program[0].first_s for program in self.programs if program)

    @property
    def end_s(self) -> float:
        """When the last one ends."""
        return max(program[-1].end_s for program in self.programs if program)

    @property
    def wall_s(self) -> float:
        """How long it took."""
        return self.end_s - self.start_s

    @property
    def num_steps(self) -> int:
        """How often its first phase comes."""
        names = [block.phase.op for block in self.programs[0] if block.phase]
        return names.count(names[0])

    @cached_property
    def _arrivals(self) -> Arrivals:
        return Arrivals(tuple(range(len(self.programs))), np.array([one.come_s for one in self.meetings]),
                        np.array([one.left_s for one in self.meetings]), self.start_s)

    @property
    def lost_s(self) -> list[float]:
        """Of each rank, for how long all others had come and waited for it alone."""
        return self._arrivals.lost_s if len(self.programs) > 1 else [0.0]

    @property
    def late_rank(self) -> int | None:
        """The rank that the others wait for over and over (book.look.arrivals has the rule); None if none is."""
        return self._arrivals.late_position if len(self.programs) > 1 else None

    @property
    def late_phase(self) -> str | None:
        """The phase in which the late rank's own time is longer than the others', most of all; None without one."""
        if self.late_rank is None:
            return None
        own = [self.own_s(rank) for rank in range(len(self.programs))]
        late = own.pop(self.late_rank)
        return max(late, key=lambda name: late[name] - float(np.median([other[name] for other in own])))

    @property
    def verdict(self) -> str:
        """Whom the others wait for, in words, also where no rank can be named."""
        if self.late_rank is None:
            return (f"no rank can be named: for {sum(self.lost_s) / self.wall_s:.0%} of the time all others waited for "
                    "one of them, and not for the same one over and over")
        return f"the others wait for rank {self.late_rank}, most of all in {self.late_phase}"

    @property
    def moving_s(self) -> float:
        """How long messages were under way after the last rank had come: nothing hides that."""
        return sum(one.moving_s for one in self.meetings)

    def timed_s(self, rank: int) -> dict[str, float]:
        """Of each phase its seconds, as a monitor adds them up."""
        return self._sums(rank, lambda block, start_s, end_s: end_s - start_s)

    def own_s(self, rank: int) -> dict[str, float]:
        """Of each phase the seconds in which the rank did not wait for others or for messages."""
        return self._sums(rank, lambda block, start_s, end_s: (block.called_s if block.calls else end_s) - start_s)

    def waited_s(self, rank: int) -> float:
        """How long a rank waited for the last one to come."""
        return float(sum(one.come_s.max() - one.come_s[rank] for one in self.meetings))

    def _sums(self, rank: int, seconds: Callable[[RankPhase, float, float], float]) -> dict[str, float]:
        found: dict[str, float] = {}
        for block in self.programs[rank]:
            if block.phase:
                name = str(block.phase.op)
                found[name] = found.get(name, 0.0) + seconds(block, *block.phase.times_s)
        return found


def read_job(trace: Trace) -> RecordedJob:
    """The job that a trace with phases shows (book.record.phase); all-reduces outside of phases are meetings too.

    Raises ValueError for a trace without phases, where ranks differ in theirs, and where they never meet.
    """
    programs = steps_of(trace)
    blocks = list(zip(*programs))
    if any(len({block.phase and block.phase.op for block in same}) > 1 for same in blocks):
        raise ValueError("the ranks of this trace do not have the same phases in the same order")
    meetings = [SyncPoint(str(same[0].phase.op) if same[0].phase else "all-reduce",
                        np.array([block.called_s for block in same]), np.array([block.end_s for block in same]))
                for same in blocks if all(block.calls for block in same)]
    if not meetings:
        raise ValueError("in this trace no all-reduce is called by all ranks, so none can be late")
    return RecordedJob(programs, meetings)
