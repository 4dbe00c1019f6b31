"""Starting ranks that all-reduce once: `book.launch` against what else there is, all with gloo on the CPU."""
from __future__ import annotations

import importlib.util
import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.process import time_program
from benchmarks.report import Claim, Findings, Table, Unavailable, duration, ratio

QUICK = {"world_sizes": (4,), "num_rounds": 1}
PROMISED_SPEEDUP = 10
OURS, TORCHRUN = "`book.launch`", "`torchrun`"
COLUMNS = ("launched with", "ranks", "first time, as a program", "first time, ratio to `book.launch`",
           "again, from a running program", "again, ratio to `book.launch`")
NOTE = ("First time: from the start of a new Python to its end, importing torch included. Again: one more call in that "
        "program, as a notebook's next cell makes it; torchrun is a new program each time. `notebook_launcher` forks "
        "the notebook itself, which works only as long as that has not touched a GPU. Medians; ratios of the same "
        "round: median (smallest–largest).")


@dataclass(frozen=True)
class Way:
    """A way to start ranks: a program that makes `num_calls` calls, or 0 for torchrun, which is not called."""

    module: str
    num_calls: int
    needs: str = "torch"

    def command(self, world_size: int) -> list[str]:
        """The command that starts `world_size` ranks."""
        if self.num_calls:
            return [sys.executable, "-m", self.module, str(world_size), str(self.num_calls)]
        return [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world_size}",
                "-m", self.module]


WAYS = {  # more calls if a call can profit from the one before; spawn starts from scratch each time
    OURS: Way("benchmarks.programs.with_launch", 6),
    "accelerate's `notebook_launcher`": Way("benchmarks.programs.with_notebook_launcher", 4, "accelerate"),
    "`torch.multiprocessing.spawn`": Way("benchmarks.programs.with_spawn", 1),
    TORCHRUN: Way("benchmarks.programs.first_all_reduce", 0),
}


@dataclass(frozen=True)
class Sample:
    """One round of one way, in seconds: a fresh program with one call, and another call in the same program."""

    first_s: float
    again_s: float


def measure(world_sizes: Sequence[int] = (2, 4, 8, 16), num_rounds: int = 3) -> Findings:
    """Start ranks of each world size in every way, one way after the other in each round."""
    found = Findings()
    ways = dict(WAYS)
    for name, way in WAYS.items():
        if importlib.util.find_spec(way.needs) is None:
            del ways[name]
            found.left_out.append(f"{name}: {way.needs} is not installed (pip install -r requirements-frameworks.txt)")
    table = Table("Starting ranks, with a first all_reduce", COLUMNS, [], NOTE)
    for world_size in world_sizes:
        samples = _rounds(ways, world_size, num_rounds, found)
        table.rows.extend(_row(name, world_size, samples) for name in samples)
        if TORCHRUN in samples and OURS in samples:
            found.claims.append(_claim(world_size, _ratios(TORCHRUN, samples, "again_s")))
    found.tables.append(table)
    found.claims = found.claims[-1:]  # the promise is about the largest world size
    return found


def _rounds(ways: dict[str, Way], world_size: int, num_rounds: int, found: Findings) -> dict[str, list[Sample]]:
    samples: dict[str, list[Sample]] = {name: [] for name in ways}
    for _ in range(num_rounds):
        for name in list(samples):
            try:
                samples[name].append(take_sample(ways[name], world_size))
            except Unavailable as reason:
                del samples[name]
                found.left_out.append(f"{name} with {world_size} ranks: {reason}")
    return samples


def take_sample(way: Way, world_size: int) -> Sample:
    """Run one program that starts ranks in one way; raises `Unavailable` with its error if it fails."""
    whole_s, said = time_program(way.command(world_size))
    if not way.num_calls:
        return Sample(whole_s, whole_s)
    calls_s = json.loads(said.splitlines()[-1])
    return Sample(whole_s - sum(calls_s[1:]), statistics.median(calls_s[1:] or calls_s))


def _ratios(name: str, samples: dict[str, list[Sample]], part: str) -> list[float]:
    return [getattr(theirs, part) / getattr(ours, part) for theirs, ours in zip(samples[name], samples[OURS])]


def _row(name: str, world_size: int, samples: dict[str, list[Sample]]) -> tuple[str, ...]:
    cells = [name, str(world_size)]
    for part in ("first_s", "again_s"):
        against = ratio(_ratios(name, samples, part)) if OURS in samples else "–"
        cells += [duration(statistics.median(getattr(sample, part) for sample in samples[name])),
                  "1" if name == OURS else against]
    return tuple(cells)


def _claim(world_size: int, ratios: list[float]) -> Claim:
    return Claim(f"launching {world_size} ranks again is at least {PROMISED_SPEEDUP} times faster than torchrun",
                 f"{ratio(ratios)} times", statistics.median(ratios) >= PROMISED_SPEEDUP)
