"""Building the schedule of a ring all-reduce and simulating it, against the number of ranks."""
from __future__ import annotations

import math
import statistics
import time
from collections.abc import Sequence

from benchmarks.report import Claim, Findings, Table, duration
from book.collectives import ring_all_reduce
from book.cost import Link
from book.simulate import simulate

QUICK = {"num_rounds": 1}
LINK, BUFFER_BYTES = Link(latency_s=10e-6, bandwidth_bytes_per_s=12.5e9), 400e6
PROMISED_RANKS, PROMISED_S = 1024, 2.0
COLUMNS = ("ranks", "moves", "schedule built", "simulated", "both, moves a second", "both, time a move")


def measure(world_sizes: Sequence[int] = (64, 128, 256, 512, 1024), num_rounds: int = 5) -> Findings:
    """Build and simulate a ring all-reduce of each world size, each once per round; medians."""
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
    return found


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
