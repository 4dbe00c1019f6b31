"""What it costs to see every call to torch.distributed: the same work in a group that is tapped, and in a plain one."""
from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from benchmarks.report import Claim, Findings, Table, duration, ratio
from book import tap
from book.launch import launch
from book.parallel import GPT, GPTConfig

QUICK = {"num_pairs": 4}
PROMISED = {"a step of lab 2's training": 1.03, "1 KB with isend and irecv, there and back": 1.3}
NUM_TIMES = {"a step of lab 2's training": 4, "1 KB with isend and irecv, there and back": 40}
NOTE = ("2 ranks, gloo. A pair is a block of work in each of two groups, one right after the other, first by turns. "
        "Medians; ratios of the same pair: median (smallest–largest).")


def training(group: dist.ProcessGroup) -> Callable[[], object]:
    """One step of training lab 2's GPT with DDP in a group."""
    config = GPTConfig(vocab_size=65, context=32, num_layers=2, width=32, dtype=torch.float64)
    model = DistributedDataParallel(GPT.seeded(config, 0), process_group=group)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    inputs, targets = torch.randint(65, (2, 16, 32))

    def step() -> None:
        optimizer.zero_grad()
        GPT.loss(model(inputs), targets).backward()
        optimizer.step()

    return step


def ping_pong(group: dist.ProcessGroup) -> Callable[[], object]:
    """1 KB to the other rank and back in a group."""
    buffer, rank = torch.zeros(256), dist.get_rank()
    calls = (dist.isend, dist.irecv)[::-1 if rank else 1]
    return lambda: [call(buffer, 1 - rank, group=group).wait() for call in calls]


def time_pairs(num_pairs: int) -> list[list[tuple[float, float]]]:
    """On one rank: for each kind of work, `num_pairs` pairs of seconds (tapped, plain)."""
    dist.init_process_group("gloo")
    groups = {True: dist.new_group()}
    tap.stop()
    groups[False] = dist.new_group()
    return [_pairs({is_on: work(group) for is_on, group in groups.items()}, num_times, num_pairs)
            for work, num_times in zip((training, ping_pong), NUM_TIMES.values())]


def _pairs(work: dict[bool, Callable[[], object]], num_times: int, num_pairs: int) -> list[tuple[float, float]]:
    pairs = []
    for pair in range(num_pairs + 1):
        seconds = {}
        for is_on in (True, False)[::1 if pair % 2 else -1]:
            (tap.start if is_on else tap.stop)()
            dist.barrier()
            start_s = time.perf_counter()
            for _ in range(num_times):
                work[is_on]()
            seconds[is_on] = (time.perf_counter() - start_s) / num_times
        pairs.append((seconds[True], seconds[False]))
    return pairs[1:]


def measure(num_pairs: int = 100) -> Findings:
    """Time both kinds of work with and without the tap."""
    found, rows = Findings(), []
    for (what, most), pairs in zip(PROMISED.items(), launch(time_pairs, 2, num_pairs, check_calls=False)[0]):
        ratios = [tapped / plain for tapped, plain in pairs]
        tapped, plain = (duration(statistics.median(seconds)) for seconds in zip(*pairs))
        rows.append((what, plain, tapped, ratio(ratios)))
        found.claims.append(Claim(f"seen by the tap, {what} takes at most {most} times as long",
                                  f"{ratio(ratios)} times", statistics.median(ratios) <= most))
    found.tables.append(Table("What the tap costs", ("work", "plain", "tapped", "ratio"), rows, NOTE))
    return found
