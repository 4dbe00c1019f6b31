"""Estimating every layout of a model on a cluster, against the number of GPUs."""
from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import replace

from benchmarks.report import Claim, Findings, Table, duration
from book.cost import MODELS, Search, Transformer, search
from book.cost.published import A100

QUICK = {"num_rounds": 1}
SEQUENCES_PER_GPU = 3
PROMISED_GPUS, PROMISED_S = 16_384, 0.5
# A model of each kind, and the axes that are searched beside pp, dp and tp.
LONG = replace(MODELS["mixtral-8x7b"], num_tokens=32_768)
SEARCHED = {"GPT-3": (Transformer(96, 12288, 96), {}),
            "Mixtral 8x7B": (LONG, {"most_tp": 8, "most_cp": 8, "most_ep": 64})}


def measure(cluster_sizes: Sequence[int] = (64, 1024, 16_384), num_rounds: int = 5) -> Findings:
    """Search all layouts of two large models on each cluster; medians."""
    rows, found = [], Findings()
    for name in SEARCHED:
        for num_gpus in cluster_sizes:
            samples = [time_once(num_gpus, name) for _ in range(num_rounds)]
            seconds, layouts = statistics.median(seconds for seconds, _ in samples), len(samples[0][1])
            rows.append((name, f"{num_gpus:,}", f"{layouts:,}", duration(seconds),
                         f"{seconds / layouts * 1e6:.2f} µs"))
            if num_gpus == PROMISED_GPUS:
                found.claims.append(Claim(f"all layouts of {name} on {num_gpus:,} GPUs are estimated in under "
                                          f"{PROMISED_S} s", duration(seconds), seconds < PROMISED_S))
    found.tables.append(Table("Estimating all layouts", ("model", "GPUs", "layouts", "time", "a layout"), rows))
    return found


def time_once(num_gpus: int, name: str = "GPT-3") -> tuple[float, Search]:
    """Seconds for one search, and what it found."""
    model, axes = SEARCHED[name]
    cluster = replace(A100, num_gpus=num_gpus)
    start_s = time.perf_counter()
    found = search(model, cluster, SEQUENCES_PER_GPU * num_gpus, **axes)
    return time.perf_counter() - start_s, found
