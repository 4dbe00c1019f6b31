"""Building the schedule of a ring all-reduce and simulating it, against the number of ranks."""
from __future__ import annotations

import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Sequence

from benchmarks.process import time_program
from benchmarks.report import Claim, Findings, Table, Unavailable, duration
from book.collectives import ring_all_reduce
from book.cost import Link, Network
from book.mesh import Mesh
from book.pipelines import one_f_one_b
from book.simulate import StepWork, done_s, simulate, simulate_step

LINK, BUFFER_BYTES = Link(latency_s=10e-6, bandwidth_bytes_per_s=12.5e9), 400e6
PROMISED_RANKS, PROMISED_S = 1024, 2.0
COLUMNS = ("ranks", "moves", "schedule built", "simulated", "both, moves a second", "both, time a move")
RING, STEP = "ring all-reduce", "3-D step"
MANY = ((RING, 256), (RING, 1024), (RING, 4096), (RING, 16_384), (STEP, 16_384))
QUICK = {"num_rounds": 1, "many": MANY[:1]}
PROMISED_STEP_S = 30.0
MANY_COLUMNS = ("what", "ranks", "CPU time", "peak memory", "of it before")
MANY_NOTE = ("Each in a process of its own, without a trace: `done_s` and `simulate_step`. CPU time: of the simulation "
             "alone. Memory: of the whole process, and what it had before, with the package imported. The step: 16 "
             "stages of 1F1B with 128 micro-batches, tensor parallelism over 8 ranks of a node, which share a card. "
             "MB: 1,000,000 bytes. Medians.")


def measure(world_sizes: Sequence[int] = (64, 128, 256, 512, 1024), num_rounds: int = 5,
            many: Sequence[tuple[str, int]] = MANY) -> Findings:
    """Build and simulate a ring all-reduce of each world size, each once per round, then what has `many` ranks."""
    samples: dict[int, list[tuple[float, float]]] = {world_size: [] for world_size in world_sizes}
    for _ in range(num_rounds):
        for world_size in world_sizes:
            samples[world_size].append(time_once(world_size))
    both_s = {world_size: statistics.median(map(sum, samples[world_size])) for world_size in world_sizes}
    rows = [_row(n, *map(statistics.median, zip(*samples[n])), both_s[n]) for n in world_sizes]
    found = Findings([Table("Simulating a ring all-reduce", COLUMNS, rows, _growth(both_s))])
    if PROMISED_RANKS in both_s:
        promise = f"a ring of {PROMISED_RANKS} ranks is built and simulated in under {PROMISED_S:.0f} s"
        seconds = both_s[PROMISED_RANKS]
        found.claims.append(Claim(promise, duration(seconds), seconds < PROMISED_S))
    _measure_many(found, many, num_rounds)
    return found


def done_of_a_ring(world_size: int) -> None:
    """When each rank of a ring all-reduce is done."""
    done_s(ring_all_reduce(world_size), BUFFER_BYTES, LINK)


def step_on_a_mesh(world_size: int) -> None:
    """A step with 16 stages and tensor parallelism over the 8 ranks of a node, and as many replicas as that leaves."""
    mesh = Mesh.of({"pp": 16, "dp": world_size // 128, "tp": 8}, ranks_per_node=8)
    work = StepWork(forward_s=3e-3, backward_s=6e-3, tp_bytes=16e6, num_all_reduces=4, pp_bytes=16e6, dp_bytes=7e8)
    simulate_step(mesh, one_f_one_b(16, 128), work, Network(8, Link(2e-6, 400e9), LINK))


SIMULATED: dict[str, Callable[[int], None]] = {RING: done_of_a_ring, STEP: step_on_a_mesh}


def _measure_many(found: Findings, many: Sequence[tuple[str, int]], num_rounds: int) -> None:
    """Add the table of what has many ranks, each measured in a process of its own, to what was found."""
    table = Table("One rank for all that are alike", MANY_COLUMNS, [], MANY_NOTE)
    for what, world_size in many:
        command = [sys.executable, "-m", "benchmarks.programs.many_ranks", what, str(world_size)]
        try:
            said = [json.loads(time_program(command)[1]) for _ in range(num_rounds)]
        except Unavailable as reason:
            found.left_out.append(f"{what} of {world_size:,} ranks: {reason}")
            continue
        cpu_s, peak, before = (statistics.median(one[name] for one in said)
                               for name in ("cpu_s", "peak_bytes", "before_bytes"))
        table.rows.append((what, f"{world_size:,}", duration(cpu_s), _megabytes(peak), _megabytes(before)))
        if what == STEP:
            found.claims.append(Claim(f"a 3-D step of {world_size:,} ranks is simulated in at most "
                                      f"{PROMISED_STEP_S:.0f} s", duration(cpu_s), cpu_s <= PROMISED_STEP_S))
    if table.rows:
        found.tables.append(table)


def _megabytes(num_bytes: float) -> str:
    return f"{num_bytes / 1e6:.0f} MB"


def time_once(world_size: int) -> tuple[float, float]:
    """Seconds to build one schedule, and to simulate it."""
    start_s = time.perf_counter()
    schedule = ring_all_reduce(world_size)
    built_s = time.perf_counter()
    simulate(schedule, BUFFER_BYTES, LINK, contributions=False)
    return built_s - start_s, time.perf_counter() - built_s


def num_moves(world_size: int) -> int:
    """Moves of a ring all-reduce: each rank sends one chunk in each of 2(N-1) steps."""
    return 2 * (world_size - 1) * world_size


def _row(world_size: int, build_s: float, simulate_s: float, both_s: float) -> tuple[str, ...]:
    moves = num_moves(world_size)
    return (str(world_size), f"{moves:,}", duration(build_s), duration(simulate_s),
            f"{moves / both_s / 1e6:.2f} million", f"{both_s / moves * 1e9:.0f} ns")


def _growth(both_s: dict[int, float]) -> str:
    """How the time grows from the smallest to the largest ring, as a power of the number of moves."""
    few, many = min(both_s), max(both_s)
    if few == many:
        return ""
    power = math.log(both_s[many] / both_s[few]) / math.log(num_moves(many) / num_moves(few))
    return f"From {few} to {many} ranks the time grows as moves to the power of {power:.2f}: 1 would be linear."
