"""The ring that the chapter writes by hand against NCCL's all_reduce, by turns in the same processes."""
from __future__ import annotations

import statistics
from collections.abc import Sequence
from functools import partial

import torch
import torch.distributed as dist

from benchmarks.gpu.ranks import by_turns, joined, ratios, silent, slowest, spread
from benchmarks.report import Findings, Table, ratio, size
from benchmarks.ring import SIZES, AllReduce, chapter_ring
from book.cost import bus_bandwidth_bytes_per_s

REHEARSAL = {"sizes": SIZES[::4], "num_rounds": 3}
LARGER = (256 << 20,)
NOTE = ("Ring: the chapter's code, `batch_isend_irecv` at each of its 2(N−1) steps. A pair is one ring and one "
        "all_reduce of the same float32 buffer, by turns; a time is that of the slowest rank, on a GPU between CUDA "
        "events. Medians (smallest–largest); ratios of the same pair. Bus bandwidth: of the library's median, as "
        "nccl-tests counts it.")


def time_pairs(ring: AllReduce, sizes: Sequence[int], num_rounds: int) -> list[dict[str, list[float]]]:
    """On one rank: for each size in bytes the seconds of both in each round."""
    device, found = joined(), []
    for num_bytes in sizes:
        buffer = torch.zeros(num_bytes // 4, device=device)  # sums stay zero however often they are added up
        ways = {"ring": partial(ring, buffer), "library": partial(dist.all_reduce, buffer)}
        found.append(by_turns(ways, num_rounds, device))
    return found


def measure(num_gpus: int, sizes: Sequence[int] = SIZES + LARGER, num_rounds: int = 15) -> Findings:
    """Compare both on 2 ranks and on all GPUs, at each size in bytes."""
    if num_gpus < 2:
        return Findings(left_out=["ring: one GPU has nobody to pass a chunk to; it needs 2"])
    columns = ("ranks", "size", "ring", "library", "ring / library", "bus bandwidth")
    table, ring = Table("The ring by hand against the library's all_reduce", columns, [], NOTE), chapter_ring()
    for world_size in sorted({2, num_gpus}):
        run = silent(time_pairs, world_size, ring, list(sizes), num_rounds)
        for num_bytes, *by_rank in zip(sizes, *run):
            both = slowest(by_rank)
            seconds = statistics.median(both["library"])
            speed = bus_bandwidth_bytes_per_s("all_reduce", world_size, num_bytes, seconds)
            table.rows.append((f"{world_size} ({run.backend})", size(num_bytes), spread(both["ring"]),
                               spread(both["library"]), ratio(ratios(both["ring"], both["library"])),
                               f"{speed / 1e9:.2f} GB/s"))
    return Findings([table])
