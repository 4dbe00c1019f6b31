"""L2: all-reduces between ranks of this machine: how fast, in the units of nccl-tests."""
from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple

from book.cost import bus_bandwidth_bytes_per_s
from book.launch import launch

SIZES = (1 << 10, 1 << 20, 1 << 26)  # bytes: what latency decides, what both do, what bandwidth does
REPEATS, WARM_UP = 10, 3


class TimedAllReduce(NamedTuple):
    """An all-reduce of so many bytes: seconds, the fastest of REPEATS, and bus bandwidth in bytes per second."""

    num_bytes: int
    seconds: float
    bus_bytes_per_s: float


def measure(num_ranks: int) -> tuple[str, list[TimedAllReduce]]:
    """The backend, and an all-reduce of each of SIZES, each as slow as on the slowest rank."""
    run = launch(all_reduces, num_ranks, timeout_s=300)
    return run.backend, _slowest(list(run))


def _slowest(seconds: Sequence[Sequence[float]]) -> list[TimedAllReduce]:
    """Each as slow as on the slowest rank; `seconds` are those of each rank."""
    slowest = [max(times) for times in zip(*seconds)]
    speeds = [bus_bandwidth_bytes_per_s("all_reduce", len(seconds), *each) for each in zip(SIZES, slowest)]
    return [TimedAllReduce(*each) for each in zip(SIZES, slowest, speeds)]


def measure_as_rank() -> tuple[str, list[TimedAllReduce]]:
    """What `measure` returns, between the ranks of torchrun that call this."""
    import torch.distributed as dist

    from book.launch import rank_device

    seconds = all_reduces()
    every = [seconds] * dist.get_world_size()
    dist.all_gather_object(every, seconds)
    dist.destroy_process_group()
    return "nccl" if rank_device().type == "cuda" else "gloo", _slowest(every)


def all_reduces() -> list[float]:
    """What a rank does, which begins a group: the seconds of each size."""
    import torch
    import torch.distributed as dist

    from book.launch import rank_device

    device = rank_device()
    dist.init_process_group()
    found = []
    for size in SIZES:
        x = torch.ones(size // 4, device=device)
        times = []
        for repeat in range(WARM_UP + REPEATS):
            dist.barrier()
            start_s = time.perf_counter()
            dist.all_reduce(x)
            if device.type == "cuda":
                torch.cuda.synchronize()
            if repeat >= WARM_UP:
                times.append(time.perf_counter() - start_s)
        found.append(min(times))
    return found
