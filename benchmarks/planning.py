"""Estimating every layout of a model on a cluster, against the number of GPUs."""
from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import replace

from benchmarks.report import Claim, Findings, Table, duration
from book.cost import Search, Transformer, search
from book.cost.published import A100

QUICK = {"num_rounds": 1}
MODEL, SEQUENCES_PER_GPU = Transformer(96, 12288, 96), 3
PROMISED_GPUS, PROMISED_S = 16_384, 2.0


def measure(cluster_sizes: Sequence[int] = (64, 1024, 16_384), num_rounds: int = 5) -> Findings:
    """Search all layouts of a model of 175 billion parameters on each cluster; medians."""
    rows, found = [], Findings()
    for num_gpus in cluster_sizes:
        samples = [time_once(num_gpus) for _ in range(num_rounds)]
        seconds, layouts = statistics.median(seconds for seconds, _ in samples), len(samples[0][1])
        rows.append((f"{num_gpus:,}", f"{layouts:,}", duration(seconds), f"{seconds / layouts * 1e6:.2f} µs"))
        if num_gpus == PROMISED_GPUS:
            found.claims.append(Claim(f"all layouts on {num_gpus:,} GPUs are estimated in under {PROMISED_S:.0f} s",
                                      duration(seconds), seconds < PROMISED_S))
    found.tables.append(Table("Estimating all layouts of a GPT-3", ("GPUs", "layouts", "time", "a layout"), rows))
    return found


def time_once(num_gpus: int) -> tuple[float, Search]:
    """Seconds for one search, and what it found."""
    cluster = replace(A100, num_gpus=num_gpus)
    start_s = time.perf_counter()
    found = search(MODEL, cluster, SEQUENCES_PER_GPU * num_gpus)
    return time.perf_counter() - start_s, found
