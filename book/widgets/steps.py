"""L3: the step timeline: the phases of training steps on each rank, when each comes to the all-reduces, who waits.

`phases` are the names of all phases. A run has, in addition to what scene.js says about all runs,

    duration_s   how long TICKS ticks, the unit of all its times, last
    n            its ranks
    ranks        of each its `phases`, [which, from, to], `waits` for others or for messages, [from, to], and `calls`,
                 all-reduces from the rank's call to their end, [from, to]
    stops        `t`, and what is said there: the start, then each time that a phase's all-reduces have ended
    figures      its row of figures once it has been played; until then only what they mean is shown
"""
from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING, Any

from book.replay.jobs import RecordedJob, read_job
from book.trace import Trace
from book.widgets.page import Data, Recorded, arranged, each_once, heading, names_of, table
from book.widgets.show import show
from book.widgets.terms import percent
from book.widgets.timeline import TICKS, source_of
from book.words import counted, in_seconds

if TYPE_CHECKING:
    from book.widgets.live import Live

TOGETHER = 0.03  # of a step: ranks that come closer to one another come at the same time
HINT = "This is what a monitor shows. Who keeps the others waiting? Guess, then play."
MOST_RANKS = 8


def step_timeline(runs: Trace | Mapping[Any, Trace], *, title: str | None = None, labels: Sequence[str] | None = None,
                  select: Any = None) -> StepTimeline | Live:
    """Training steps of a job, or of several that the reader chooses from: phases, all-reduces, and who waits.

    `runs` are traces whose programs have named their phases (book.record.phase), with modelled times
    (book.replay.StepReplay) or measured ones. `labels` name the choices and `select` is the key to open with. Raises
    TypeError for anything but traces, ValueError for a trace without phases or with more than 8 ranks.
    """
    return show(StepTimeline(runs, title, labels, select))


def run_payload(trace: Trace, source: str, names: list[str]) -> Data:
    """What is drawn of a run; new names of phases are added to `names`."""
    job = read_job(trace)
    per_s = TICKS / job.wall_s

    def ticks(*times_s: float) -> list[int]:
        return [round((time_s - job.start_s) * per_s) for time_s in times_s]

    ranks = []
    for program in job.programs:
        names += {str(block.phase.op): 0 for block in program if block.phase and block.phase.op not in names}
        phases = [[names.index(str(block.phase.op)), *ticks(*block.phase.times_s)] for block in program if block.phase]
        calls = [ticks(call.start_s or 0.0, call.end_s or block.end_s) for block in program for call in block.calls]
        ranks.append({"phases": phases, "calls": calls,
                      "waits": [ticks(*wait) for block in program if (wait := block.wait_s)]})
    stops = [{"t": 0, "say": [["", HINT]]}, *_stops(job, ticks)]
    return {"n": trace.world_size, "source": source, "duration_s": float(f"{job.wall_s:.6g}"),
            "ranks": ranks, "stops": stops, "figures": [list(pair) for pair in figures(job)]}


def _stops(job: RecordedJob, ticks: Any) -> Iterator[Data]:
    step_s = job.wall_s / job.num_steps
    for number, meeting in enumerate(job.meetings, start=1):
        waited = float(meeting.end_s - meeting.come_s.max())
        if meeting.late_s > TOGETHER * step_s:
            say = [f"Rank {meeting.last} comes last",
                   f" to the all-reduce, {in_seconds(meeting.late_s)} after the one before it. Until then the others "
                   "wait."]
        else:
            say = ["All ranks come together", f" to the all-reduce. It takes them {in_seconds(waited)}."]
        at = f"In {meeting.name} {number}: " if meeting.name != "all-reduce" else ""
        yield {"t": ticks(meeting.end_s)[0], "say": [["", at], say]}


def figures(job: RecordedJob) -> list[tuple[str, str]]:
    """Values and what they mean: a step, who is late and in which phase, what that costs, and what messages take."""
    wall_s, late, lost_s = job.wall_s, job.late_rank, job.lost_s
    who = "nobody" if late is None else f"rank {late}, {job.late_phase}"
    alone_s = sum(lost_s) if late is None else lost_s[late]
    return [(in_seconds(wall_s / job.num_steps), "a step"), (who, "comes last over and over"),
            (percent(alone_s / wall_s), "of the time all wait for a single rank"),
            (percent(job.moving_s / wall_s), "of the time messages travel, and all wait")]


TITLE = "Training steps, rank by rank"


class StepTimeline(Recorded):
    """What a step timeline shows: runs by key."""

    widget, maker, takes = "steps", "step_timeline", "a Trace (run.trace)"

    def __init__(self, runs: Any, title: str | None = None, labels: Sequence[str] | None = None, select: Any = None):
        super().__init__(runs, title, labels, select)
        for trace in self.traces.values():
            if trace.world_size > MOST_RANKS:
                raise ValueError(f"a step timeline has room for {MOST_RANKS} ranks, not {trace.world_size}")
        self.title = title or TITLE
        self._payload = {live: self._drawn(live) for live in (False, True)}

    def data(self, live: bool) -> Data:
        """The timeline's data; in a live notebook with the backend's name."""
        return self._payload[live]

    def _drawn(self, live: bool) -> Data:
        names: list[str] = []
        runs = {key: run_payload(trace, source_of(trace, live), names) for key, trace in self.traces.items()}
        return {"title": self.title, "phases": names, **arranged(runs, self._labels, self._select)}

    def text(self) -> str:
        """One line that says what is shown."""
        clocks = each_once(trace.clock for trace in self.traces.values())
        return (f"{self.title}: step timeline{self.several()}, {self.ranks()}, order {self.sources()}, durations "
                f"{clocks}")

    def words(self) -> str:
        """The figures of each run, and how long each phase took on each rank of the one that is shown first."""
        jobs = {key: read_job(trace) for key, trace in self.traces.items()}
        pairs = [figures(job) for job in jobs.values()]
        head = ["job", *(meaning for _, meaning in pairs[0])]
        rows = [[name, *(value for value, _ in some)] for name, some in zip(names_of(jobs), pairs)]
        return heading(self.title, self._payload[False]["runs"][0]["source"]) + table(rows, head) + self._phases(jobs)

    def _phases(self, jobs: Mapping[Any, RecordedJob]) -> str:
        key = next(iter(jobs)) if self._select is None else self._select
        job = jobs[key]
        names = list(job.own_s(0))
        rows = [[f"rank {rank}", *(in_seconds(job.timed_s(rank)[name] / job.num_steps) for name in names)]
                for rank in range(len(job.programs))]
        of = f" of {escape(names_of([key])[0])}" if len(jobs) > 1 else ""
        return f"<p>A step{of} by phase, mean of {counted(job.num_steps, 'step')}, waiting included:</p>" + table(
            rows, ["", *names])
