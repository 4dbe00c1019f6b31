"""The ring that the chapter writes by hand against gloo's all_reduce, by turns in the same processes."""
from __future__ import annotations

import contextlib
import io
import statistics
import time
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from benchmarks.chapter import code_that_binds
from benchmarks.process import ROOT
from benchmarks.report import Claim, Findings, Table, duration, ratio, size
from book.launch import launch

CHAPTER = ROOT / "chapters" / "03_ring_all_reduce.ipynb"
SIZES = tuple(4**exponent << 10 for exponent in range(9))  # 1 KB to 64 MB
QUICK = {"world_sizes": (4,), "sizes": SIZES[::4], "num_pairs": 5}
PROMISED_RATIO, LARGE_BYTES = 1.5, 16 << 20
NOTE = ("Ring: the chapter's code. A pair is one ring and one gloo all_reduce of the same float32 buffer, one right "
        "after the other; a time is that of the slowest rank. Medians; ratios of the same pair: median "
        "(smallest–largest).")

AllReduce = Callable[[torch.Tensor], object]


def chapter_ring() -> AllReduce:
    """The chapter's own `ring`: runs the code cell that defines it, so this can't differ from the chapter.

    Raises ValueError if no cell defines it.
    """
    names = {"__name__": "chapter", "dist": dist, "torch": torch}  # not a module: it travels to ranks by value
    exec(compile(code_that_binds(CHAPTER, "ring"), str(CHAPTER), "exec"), names)
    return names["ring"]


def time_pairs(ring: AllReduce, sizes: Sequence[int], num_pairs: int) -> list[list[tuple[float, float]]]:
    """On one rank: for each size in bytes, `num_pairs` pairs of seconds (ring, gloo); they go first by turns."""
    dist.init_process_group("gloo")
    pairs = []
    for num_bytes in sizes:
        buffer = torch.zeros(num_bytes // 4)  # sums stay zero however often they are added up
        time_once(ring, buffer), time_once(dist.all_reduce, buffer)  # opens connections, touches memory
        turns = []
        for turn in range(num_pairs):
            order = (ring, dist.all_reduce)[::1 if turn % 2 else -1]
            seconds = {all_reduce: time_once(all_reduce, buffer) for all_reduce in order}
            turns.append((seconds[ring], seconds[dist.all_reduce]))
        pairs.append(turns)
    return pairs


def time_once(all_reduce: AllReduce, buffer: torch.Tensor) -> float:
    """Seconds of one all-reduce on this rank, from a common start."""
    dist.barrier()
    start_s = time.perf_counter()
    all_reduce(buffer)
    return time.perf_counter() - start_s


def measure(world_sizes: Sequence[int] = (2, 4), sizes: Sequence[int] = SIZES, num_pairs: int = 15) -> Findings:
    """Compare both on each world size, at each size in bytes."""
    ring, found, large = chapter_ring(), Findings(), {}
    table = Table("The ring by hand against gloo", ("ranks", "size", "ring", "gloo", "ring / gloo"), [], NOTE)
    for world_size in world_sizes:
        with contextlib.redirect_stdout(io.StringIO()):  # launch says where the ranks run
            run = launch(time_pairs, world_size, ring, list(sizes), num_pairs, timeout_s=600)
        for num_bytes, *by_rank in zip(sizes, *run):
            pairs = [tuple(map(max, zip(*ranks))) for ranks in zip(*by_rank)]
            ratios = [ring_s / gloo_s for ring_s, gloo_s in pairs]
            ring_s, gloo_s = map(statistics.median, zip(*pairs))
            table.rows.append((str(world_size), size(num_bytes), duration(ring_s), duration(gloo_s), ratio(ratios)))
            if num_bytes >= LARGE_BYTES:
                large[world_size, num_bytes] = statistics.median(ratios)
    found.tables.append(table)
    if large:
        found.claims.append(_claim(large))
    return found


def _claim(large: dict[tuple[int, int], float]) -> Claim:
    (world_size, num_bytes), worst = max(large.items(), key=lambda item: item[1])
    return Claim(f"from {size(LARGE_BYTES)} on the ring by hand takes at most {PROMISED_RATIO} times as long as gloo",
                 f"at most {worst:.2f} times ({world_size} ranks, {size(num_bytes)})", worst <= PROMISED_RATIO)
