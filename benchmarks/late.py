"""Who is late: how often `lockstep run`, and `lockstep show` from traces alone, name the right rank and phase."""
from __future__ import annotations

import random
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.process import time_program
from benchmarks.report import Claim, Findings, Table
from book.look.arrivals import Arrivals, arrivals
from book.look.profiles import read_profile
from book.look.runs import FILE, read_run
from book.look.timelines import arrivals_of

QUICK = {"num_jobs": 3}
PROGRAM = Path(__file__).with_name("programs") / "late_job.py"
PHASES = ("input", "forward", "backward", "optimizer", "garbage collector")
KINDS = (*PHASES, "jitter", "nobody")
EXTRA_MS = (12, 25, 50)  # in each step
NUM_RANKS, SEED = 3, 11  # none of these jobs is among those on which the rule's numbers were chosen
LEAST = 0.9
NOTE = (f"{NUM_RANKS} ranks of DDP on gloo, 90 steps of about 25 ms; drawn are the kind, the rank and its extra "
        f"{', '.join(map(str, EXTRA_MS))} ms a step. The traces are of the same jobs; from traces `show` names "
        "no phase. A false accusation names another rank than the late one, or any where none is late.")


@dataclass(frozen=True)
class Job:
    """What was drawn: `rank` is None where no single rank is late."""

    kind: str
    rank: int | None
    extra_ms: int


@dataclass(frozen=True)
class Verdict:
    """Which rank is said to be late, if any, and in which phase, where that is said."""

    rank: int | None = None
    phase: str | None = None


@dataclass(frozen=True)
class Score:
    """Counts of jobs: with a late rank, without; where the rank was right; rank and phase; another rank was named."""

    late: int
    clean: int
    rank: int
    both: int
    false: int


def drawn(num_jobs: int) -> list[Job]:
    """Jobs of all kinds in turn, in an order and with ranks that the seed decides; fewer are the first of more."""
    draw, jobs = random.Random(SEED), list[Job]()
    while len(jobs) < num_jobs:
        jobs += [Job(kind, draw.randrange(NUM_RANKS) if kind in PHASES else None, draw.choice(EXTRA_MS))
                 for kind in draw.sample(KINDS, len(KINDS))]
    return jobs[:num_jobs]


def verdict(found: Arrivals | None) -> Verdict:
    """What is said of these arrivals."""
    position = found.late_position if found else None
    if found is None or position is None:
        return Verdict()
    excess = found.excess_s(position)
    return Verdict(found.ranks[position], max(excess, key=excess.__getitem__) if excess else None)


def run(job: Job) -> tuple[Verdict, Verdict]:
    """Run a job under `lockstep run`: what its notes say, and what its traces say. Raises Unavailable if it fails."""
    with tempfile.TemporaryDirectory() as folder:
        time_program([sys.executable, "-m", "book", "run", "--ranks", str(NUM_RANKS), "--out", folder, str(PROGRAM),
                      job.kind, str(-1 if job.rank is None else job.rank), str(job.extra_ms), folder])
        traces = [read_profile(Path(folder, f"{rank}.json")) for rank in range(NUM_RANKS)]
        return verdict(arrivals_of(read_run(Path(folder, FILE)).timelines)), verdict(arrivals(traces))


def score(jobs: Sequence[Job], verdicts: Sequence[Verdict]) -> Score:
    """How often the verdicts are right."""
    right = [job.rank is not None and job.rank == said.rank for job, said in zip(jobs, verdicts, strict=True)]
    late = sum(job.rank is not None for job in jobs)
    return Score(late, len(jobs) - late, sum(right),
                 sum(named and job.kind == said.phase for named, job, said in zip(right, jobs, verdicts)),
                 sum(said.rank is not None and not named for named, said in zip(right, verdicts)))


def findings(jobs: Sequence[Job], said: Sequence[tuple[Verdict, Verdict]]) -> Findings:
    """The table and the claims, of what was said of each job under `lockstep run`, and from its traces."""
    under, alone = (score(jobs, column) for column in zip(*said, strict=True))
    rows = [(name, f"{found.rank} of {found.late}", f"{found.both} of {found.late}" if has_phase else "–",
             f"{found.false} of {len(jobs)}")
            for name, found, has_phase in (("`lockstep run`", under, True), ("traces alone", alone, False))]
    missed = [f"{job.kind} by {job.extra_ms} ms" + (f" on rank {job.rank}" if job.rank is not None else "")
              + f": {'nobody' if one.rank is None else f'rank {one.rank}, {one.phase}'}"
              for job, (one, _) in zip(jobs, said)
              if one.rank != job.rank or (job.rank is not None and one.phase != job.kind)]
    note = NOTE + (f" `lockstep run` was wrong about: {'; '.join(missed)}." if missed else "")
    return Findings([Table("Who is late", ("seen by", "rank right", "rank and phase right", "false accusations"), rows,
                           note)],
                    [Claim(f"`lockstep run` names the late rank and its phase in {LEAST:.0%} of the jobs that have one",
                           f"{under.both} of {under.late}", under.both >= LEAST * under.late),
                     Claim("`lockstep run` accuses no rank falsely", f"{under.false} of {len(jobs)}", not under.false)])


def measure(num_jobs: int = 21) -> Findings:
    """Draw jobs, run them one after the other, and count."""
    jobs = drawn(num_jobs)
    return findings(jobs, [run(job) for job in jobs])
