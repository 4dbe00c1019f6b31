"""Timing inside ranks, on the device that they compute on, and summaries of the times."""
from __future__ import annotations

import contextlib
import io
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.report import duration
from book.launch import Run, launch, rank_device

Work = Callable[[], object]
LAUNCH_LIMIT_S = 200.0


def joined() -> torch.device:
    """Join the default group as the book's ranks do; returns this rank's device."""
    device = rank_device()
    dist.init_process_group()
    return device


def finish(device: torch.device) -> None:
    """Wait until a GPU has done all its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def time_once(work: Work, device: torch.device) -> float:
    """Seconds of `work` on this rank, from a common start; on a GPU between two events on its stream.

    Work on other streams counts if the current stream waits for it, as it does after `wait()`.
    """
    dist.barrier()
    finish(device)
    if device.type != "cuda":
        start_s = time.perf_counter()
        work()
        return time.perf_counter() - start_s
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    work()
    end.record()
    finish(device)
    return start.elapsed_time(end) / 1e3


def by_turns(ways: dict[str, Work], num_rounds: int, device: torch.device, num_warm: int = 3) -> dict[str, list[float]]:
    """Seconds of each way in each round, on this rank; the first way changes, and the first rounds do not count."""
    names, seconds = list(ways), {name: [] for name in ways}
    for turn in range(num_warm + num_rounds):
        for name in names[turn % len(names):] + names[:turn % len(names)]:
            taken_s = time_once(ways[name], device)
            if turn >= num_warm:
                seconds[name].append(taken_s)
    return seconds


def silent(function: Callable[..., Any], world_size: int, *args: Any, **options: Any) -> Run:
    """Launch without the line that says where the ranks run."""
    with contextlib.redirect_stdout(io.StringIO()):
        return launch(function, world_size, *args, timeout_s=LAUNCH_LIMIT_S, hang_s=LAUNCH_LIMIT_S, **options)


def slowest(by_rank: Sequence[dict[str, list[float]]]) -> dict[str, list[float]]:
    """The seconds of the slowest rank, for each way and round."""
    return {name: [max(turn) for turn in zip(*(rank[name] for rank in by_rank))] for name in by_rank[0]}


def spread(seconds: Sequence[float]) -> str:
    """Times in one cell: the median, and in parentheses the smallest and the largest."""
    if len(seconds) == 1:
        return duration(seconds[0])
    return f"{duration(statistics.median(seconds))} ({duration(min(seconds))}–{duration(max(seconds))})"


def ratios(above: Sequence[float], below: Sequence[float]) -> list[float]:
    """Each time divided by the other one of its round."""
    return [one / other for one, other in zip(above, below)]


def world_sizes(num_gpus: int) -> list[int]:
    """1, 2, 4 ... ranks, and as many as there are GPUs."""
    return sorted({2**power for power in range(num_gpus.bit_length()) if 2**power <= num_gpus} | {num_gpus})
