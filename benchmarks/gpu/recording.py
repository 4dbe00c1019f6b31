"""The recorder on streams: what it costs, and whether its times agree with CUDA events and NCCL's own times."""
from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from benchmarks.gpu.overlap import Size, Steps
from benchmarks.gpu.ranks import finish, joined, ratios, silent, spread, time_once, world_sizes
from benchmarks.report import Findings, Table, duration, ratio, size
from book.record import follow_backward
from book.trace import Trace

REHEARSAL = {"step": Size(256, 3, 32), "num_bytes": (1 << 16, 1 << 20), "num_rounds": 2, "num_steps": 5}
COST_NOTE = ("A round is three launches, one after the other: DDP's step unrecorded, with `record=True`, and with "
             "`follow_backward` around it too. A time is the median step of the slowest rank. Medians over the rounds "
             "(smallest–largest); ratios of the same round.")
COLLECTIVE_NOTE = ("One all-reduce at a time, of one bucket of DDP's. Recorded: from its `start_s` to its `end_s` in "
                   "the trace. NCCL's own: by its events on its stream (TORCH_NCCL_ENABLE_TIMING; on the CPU by the "
                   "program's clock). Apart: how far ranks' `end_s` of the same all-reduce differ. Medians "
                   "(smallest–largest).")
BACKWARD_NOTE = ("Recorded: from the start of the first gradient to the end of the last. Events: two CUDA events "
                 "around the same `backward()`; they also see the loss's own gradient. One rank, no DDP.")


@dataclass
class Watcher:
    """A communication hook that averages as DDP does, and times each all-reduce with a second clock."""

    device: torch.device
    works: list[Any] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    def send(self, group: dist.ProcessGroup, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Send one bucket."""
        total, start_s = bucket.buffer().mul_(1 / group.size()), time.perf_counter()
        work = dist.all_reduce(total, group=group, async_op=True)
        if self.device.type == "cuda":
            self.works.append(work)
            return work.get_future().then(lambda future: future.value()[0])
        return work.get_future().then(lambda future: self._done(start_s, future))

    def _done(self, start_s: float, future: torch.futures.Future) -> torch.Tensor:
        self.seconds.append(time.perf_counter() - start_s)
        return future.value()[0]

    def own_seconds(self) -> list[float]:
        """Seconds of each all-reduce, once the device has done them."""
        finish(self.device)
        return self.seconds or [work._get_duration() / 1e3 for work in self.works]


def collectives(num_elements: int, num_repeats: int) -> list[float]:
    """On one rank: a second clock's seconds of recorded all-reduces, one for each backward pass of a single weight."""
    device = joined()
    model = DDP(nn.Linear(num_elements, 1, bias=False).to(device))
    inputs, watcher = torch.ones(1, num_elements, device=device), Watcher(device)
    for repeat in range(num_repeats + 3):
        dist.barrier()
        finish(device)
        if repeat < 3:
            with follow_backward(model, hook=Watcher(device).send):
                model(inputs).sum().backward()
            continue
        with follow_backward(model, hook=watcher.send):
            model(inputs).sum().backward()
    return watcher.own_seconds()


def gradients(step: Size, num_repeats: int) -> list[float]:
    """On one rank, no DDP: recorded backward passes, and seconds of each by events around it."""
    device, seconds = joined(), []
    layers = [nn.Linear(step.width, step.width, bias=False) for _ in range(step.num_layers)]
    model, inputs = nn.Sequential(*layers).to(device), torch.randn(step.batch, step.width, device=device)
    model(inputs).sum().backward()
    for _ in range(num_repeats):
        model.zero_grad()
        with follow_backward(model):
            loss = model(inputs).sum()
            seconds.append(time_once(loss.backward, device))
    return seconds


def recorded_steps(step: Size, num_steps: int, followed: bool) -> float:
    """On one rank: the median seconds of DDP's step, in a process that records or not."""
    steps, seconds = Steps(step, joined()), []
    for number in range(num_steps + 3):
        if followed and number >= 3:
            with follow_backward(steps.model):
                taken_s = time_once(steps.overlapped, steps.inputs.device)
        else:
            taken_s = time_once(steps.overlapped, steps.inputs.device)
        seconds.append(taken_s)
    return statistics.median(seconds[3:])


def measure(num_gpus: int, step: Size = Size(1024, 12, 512), num_bytes: Sequence[int] = (1 << 16, 1 << 22, 1 << 26),
            num_rounds: int = 3, num_steps: int = 20) -> Findings:
    """Compare on one rank and on all GPUs."""
    found = Findings()
    cost = Table("The recorder's cost", ("ranks", "unrecorded", "recorded", "followed", "recorded / unrecorded",
                                         "followed / unrecorded"), [], COST_NOTE)
    clocks = Table("The recorder's all-reduces", ("ranks", "size", "recorded", "NCCL's own", "ratio", "apart"), [],
                   COLLECTIVE_NOTE)
    for world_size in sorted({1, world_sizes(num_gpus)[-1]}):
        cost.rows.append(_cost_row(world_size, step, num_rounds, num_steps))
        clocks.rows.extend(_collective_row(world_size, one, num_steps) for one in num_bytes)
    run = silent(gradients, 1, step, num_steps, record=True)
    recorded = passes(run.trace)
    backward = Table("The recorder's backward pass", ("backend", "recorded", "events", "recorded / events"),
                     [(run.backend, spread(recorded), spread(run[0]), ratio(ratios(recorded, run[0])))], BACKWARD_NOTE)
    found.tables += [cost, clocks, backward]
    return found


def _cost_row(world_size: int, step: Size, num_rounds: int, num_steps: int) -> tuple[str, ...]:
    ways = {"unrecorded": (False, False), "recorded": (True, False), "followed": (True, True)}
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(num_rounds):
        for name, (record, followed) in ways.items():
            seconds[name].append(max(silent(recorded_steps, world_size, step, num_steps, followed, record=record)))
    unrecorded, *others = seconds.values()
    return (str(world_size), *map(spread, seconds.values()), *(ratio(ratios(other, unrecorded)) for other in others))


def _collective_row(world_size: int, num_bytes: int, num_repeats: int) -> tuple[str, ...]:
    run = silent(collectives, world_size, num_bytes // 4, num_repeats, record=True,
                 env={"TORCH_NCCL_ENABLE_TIMING": "1"})
    all_reduces = [[event for event in run.trace.of_rank(rank) if event.bucket is not None and event.op == "all_reduce"]
                   for rank in range(world_size)]
    kept = [rank[-num_repeats:] for rank in all_reduces]
    recorded = [event.end_s - event.start_s for event in kept[0]]
    apart = [max(ends) - min(ends) for ends in zip(*([event.end_s for event in rank] for rank in kept))]
    return (f"{world_size} ({run.backend})", size(num_bytes), spread(recorded), spread(run[0]),
            ratio(ratios(recorded, run[0])), duration(statistics.median(apart)))


def passes(trace: Trace) -> list[float]:
    """Seconds of each recorded backward pass of rank 0, from its first gradient's start to its last one's end."""
    found: list[list[float]] = []
    first = None
    for event in trace.of_rank(0):
        if event.kind == "compute":
            first = first or event.op
            if event.op == first:
                found.append([event.start_s, event.end_s])
            found[-1][1] = event.end_s
    return [end_s - start_s for start_s, end_s in found]
