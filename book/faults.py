"""L1: what failures cost a training run: how often to save, and a run in which hardware fails.

A job on some nodes trains for `interval_s`, saves for `save_s`, and so on. Nodes fail at any time, each after
`mtbf_s` on average. A failure throws away what was not yet saved. After `restart_s`, which includes the time until it
is noticed, the job goes on from the last whole checkpoint. The job's own mean time between failures is that of a node
divided by their number.
"""
from __future__ import annotations

import heapq
import math
import random
from dataclasses import dataclass


@dataclass(frozen=True)
class Job:
    """A job on `num_nodes` nodes with `num_spares` idle ones; a broken node is back after `repair_s`."""

    num_nodes: int
    mtbf_s: float
    save_s: float
    restart_s: float
    num_spares: int = 0
    repair_s: float = 0.0

    def __post_init__(self) -> None:
        if self.num_nodes < 1 or self.num_spares < 0:
            raise ValueError(f"a job needs a node, not {self.num_nodes}, and no fewer than 0 spares")
        if self.mtbf_s <= 0 or min(self.save_s, self.restart_s, self.repair_s) < 0:
            raise ValueError("mtbf_s must be above 0, and save_s, restart_s and repair_s at least 0")

    @property
    def job_mtbf_s(self) -> float:
        """Seconds between two failures of the job, on average."""
        return self.mtbf_s / self.num_nodes


@dataclass(frozen=True)
class Outcome:
    """Where the seconds of a run went; they add up to its length. `num_failures` struck in it."""

    useful_s: float
    saving_s: float
    lost_s: float
    restarting_s: float
    waiting_s: float
    num_failures: int

    @property
    def total_s(self) -> float:
        """The length of the run."""
        return self.useful_s + self.saving_s + self.lost_s + self.restarting_s + self.waiting_s

    @property
    def goodput(self) -> float:
        """The share of the run that training has kept, from 0 to 1."""
        return self.useful_s / self.total_s


def young(save_s: float, mtbf_s: float) -> float:
    """Seconds between checkpoints that lose the least time, to first order (young1974); `mtbf_s` is the job's."""
    return math.sqrt(2 * save_s * mtbf_s)


def daly(save_s: float, mtbf_s: float) -> float:
    """The same to a higher order, right also where saving takes a good part of the time between failures (daly2006)."""
    if save_s >= 2 * mtbf_s:
        return mtbf_s
    x = math.sqrt(save_s / (2 * mtbf_s))
    return math.sqrt(2 * save_s * mtbf_s) * (1 + x / 3 + x * x / 9) - save_s


def expected_goodput(job: Job, interval_s: float) -> float:
    """The share of time that a very long run keeps, if a spare is always there (daly2006).

    A segment of `interval_s` and its save, tried again after each failure until it is whole, takes
    M exp(R/M) (exp((interval + save)/M) - 1) seconds on average, with the job's mean time between failures M and R to
    restart. Failures may also strike while the job saves or restarts.
    """
    mean_s = job.job_mtbf_s
    exponent = (interval_s + job.save_s) / mean_s
    if exponent + job.restart_s / mean_s > 700:
        return 0.0  # the exponential would overflow
    return interval_s / (mean_s * math.exp(job.restart_s / mean_s) * math.expm1(exponent))


def run(job: Job, interval_s: float, length_s: float, seed: int) -> Outcome:
    """A run of `length_s` or a little more, with failures drawn from `seed`, that saves every `interval_s`.

    A broken node is replaced by a spare while there is one; else the job waits until one is repaired.
    """
    if interval_s <= 0 or length_s <= 0:
        raise ValueError(f"an interval of {interval_s:g} s and a length of {length_s:g} s: both must be above 0")
    draws, pool = random.Random(seed), _Pool(job)
    now = useful_s = saving_s = lost_s = restarting_s = waiting_s = 0.0
    num_failures, segment_s = 0, interval_s + job.save_s
    failure_s = _failure(job, draws, now)
    while True:
        num_whole = min(int((failure_s - now) / segment_s), math.ceil((length_s - now) / segment_s))
        useful_s += num_whole * interval_s
        saving_s += num_whole * job.save_s
        now += num_whole * segment_s
        if now >= length_s:
            return Outcome(useful_s, saving_s, lost_s, restarting_s, waiting_s, num_failures)
        lost_s += failure_s - now
        restarted = False
        while not restarted:
            num_failures += 1
            now = pool.replaced(failure_s)
            waiting_s += now - failure_s
            failure_s = _failure(job, draws, now)
            restarted = failure_s >= now + job.restart_s
            spent_s = min(failure_s - now, job.restart_s)
            restarting_s += spent_s
            now += spent_s


def _failure(job: Job, draws: random.Random, now: float) -> float:
    """When the job next fails."""
    return now + draws.expovariate(1 / job.job_mtbf_s)


class _Pool:
    """The spares, and when broken nodes are repaired."""

    def __init__(self, job: Job) -> None:
        self._repair_s, self._free_at = job.repair_s, [0.0] * job.num_spares

    def replaced(self, now: float) -> float:
        """When a node that breaks now has been replaced; it joins the spares once it is repaired."""
        heapq.heappush(self._free_at, now + self._repair_s)
        return max(now, heapq.heappop(self._free_at))
