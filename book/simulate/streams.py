"""L2: a training step on two streams: what a GPU computes, and what its network carries meanwhile.

Each stream does its tasks in order, and a task also waits for the tasks that it needs. All ranks do the same, so one
stands for them all.
"""
from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from book.cost.links import Link, ring_all_gather_s, ring_all_reduce_s, ring_reduce_scatter_s
from book.cost.state import check_zero_stage
from book.trace import Event, Trace


@dataclass(frozen=True)
class Task:
    """One thing that a stream does: `stream` is "compute" or "network", `needs` are the places of earlier tasks."""

    stream: str
    op: str  # "forward", "backward", or the collective
    unit: int  # of which layer or bucket
    duration_s: float
    needs: tuple[int, ...] = ()


def stream_times(tasks: Sequence[Task]) -> list[tuple[float, float]]:
    """When each task starts and ends, in seconds from the first start."""
    free: dict[str, float] = {}
    times: list[tuple[float, float]] = []
    for task in tasks:
        start_s = max([free.get(task.stream, 0.0), *(times[i][1] for i in task.needs)])
        free[task.stream] = start_s + task.duration_s
        times.append((start_s, free[task.stream]))
    return times


def fill_buckets(gradient_bytes: Sequence[float], cap_bytes: float) -> list[list[int]]:
    """The places of gradients in each bucket, which closes when it has `cap_bytes` or more, as DDP's do (li2020)."""
    buckets: list[list[int]] = [[]]
    filled = 0.0
    for i, num_bytes in enumerate(gradient_bytes):
        if filled >= cap_bytes:
            buckets.append([])
            filled = 0.0
        buckets[-1].append(i)
        filled += num_bytes
    return [bucket for bucket in buckets if bucket]


def bucketed_backward(gradient_bytes: Sequence[float], cap_bytes: float, world_size: int, s_per_byte: float,
                      link: Link) -> list[Task]:
    """A backward pass whose gradients, in this order, are all-reduced in buckets on a ring, each when it is full.

    A gradient takes `s_per_byte` for each of its bytes, as in `book.replay.Replay`.
    """
    tasks = [Task("compute", "backward", i, num_bytes * s_per_byte) for i, num_bytes in enumerate(gradient_bytes)]
    for number, bucket in enumerate(fill_buckets(gradient_bytes, cap_bytes)):
        num_bytes = sum(gradient_bytes[i] for i in bucket)
        tasks.append(Task("network", "all_reduce", number, ring_all_reduce_s(world_size, num_bytes, link),
                          (bucket[-1],)))
    return tasks


def simulate_backward(gradient_bytes: Mapping[str, float], cap_bytes: float, world_size: int, s_per_byte: float,
                      link: Link, num_passes: int = 1) -> Trace:
    """The trace of `bucketed_backward`, in which a gradient has its parameter's name; all ranks do the same.

    Of `num_passes` backwards in a row the last one sends, as under DDP's `no_sync()`.
    """
    names, sizes, everyone = list(gradient_bytes), list(gradient_bytes.values()), tuple(range(world_size))
    bucket_of = {i: number for number, bucket in enumerate(fill_buckets(sizes, cap_bytes)) for i in bucket}
    tasks = bucketed_backward(sizes, cap_bytes, world_size, s_per_byte, link)
    pass_s, events = sum(sizes) * s_per_byte, []
    times = [(number * pass_s, task, at) for number in range(num_passes) for task, at in zip(tasks, stream_times(tasks))
             if task.stream == "compute" or number == num_passes - 1]
    for from_s, task, (start_s, end_s) in times:
        if task.stream == "compute":
            bucket = bucket_of[task.unit] if from_s == times[-1][0] else None
            one = Event(0, "compute", names[task.unit], num_bytes=sizes[task.unit], bucket=bucket)
        else:
            num_bytes = sum(size for i, size in enumerate(sizes) if bucket_of[i] == task.unit)
            one = Event(0, "collective", "all_reduce", group=everyone, num_bytes=num_bytes, bucket=task.unit)
        one = replace(one, start_s=from_s + start_s, end_s=from_s + end_s)
        events += [replace(one, rank=rank) for rank in everyone]
    return Trace(events, world_size, "modelled", "simulated", name="backward")


def sharded_step(zero_stage: int, num_shards: int, num_units: int, unit_bytes: float, forward_s: float, link: Link,
                 prefetch: bool = True) -> list[Task]:
    """Forward and backward of equal units with sharded state, without the update, which takes no time here.

    A unit's parameters have `unit_bytes`, and its gradients as many; its forward takes `forward_s` and its backward
    twice that. Stage 0 all-reduces gradients; 1 and 2 reduce-scatter them, and all-gather the parameters at the end;
    3 gathers a unit before its forward and again before its backward, the next one while this one computes if
    `prefetch`. Raises ValueError for another stage.
    """
    check_zero_stage(zero_stage)
    gather_s, scatter_s, reduce_s = (form(num_shards, unit_bytes, link) for form in (
        ring_all_gather_s, ring_reduce_scatter_s, ring_all_reduce_s))
    tasks: list[Task] = []
    order = [("forward", unit) for unit in range(num_units)]
    order += [("backward", unit) for unit in reversed(range(num_units))]
    gathered: dict[int, int] = {}  # for each place in the order, its gather
    computed: list[int] = []  # for each place, what it computes

    def gather(place: int) -> None:
        if zero_stage == 3 and place < len(order) and place not in gathered:
            behind = place - 2 if prefetch else place - 1
            gathered[place] = len(tasks)
            tasks.append(Task("network", "all_gather", order[place][1], gather_s,
                              (computed[behind],) if behind >= 0 else ()))

    for place, (op, unit) in enumerate(order):
        gather(place)
        if prefetch:
            gather(place + 1)
        computed.append(len(tasks))
        tasks.append(Task("compute", op, unit, forward_s * (1 if op == "forward" else 2),
                          (gathered[place],) if place in gathered else ()))
        if op == "backward":
            how = ("reduce_scatter", scatter_s) if zero_stage else ("all_reduce", reduce_s)
            tasks.append(Task("network", how[0], unit, how[1], (computed[-1],)))
    last = len(tasks) - 1
    tasks += [Task("network", "all_gather", unit, gather_s, (last,)) for unit in range(num_units)
              if zero_stage in (1, 2)]
    return tasks


def gathered_bytes(tasks: Sequence[Task], times: Sequence[tuple[float, float]], zero_stage: int, num_shards: int,
                   unit_bytes: float) -> float:
    """The most bytes that a rank of `sharded_step` holds for a while beside its shards.

    In stage 3 a unit's parameters, from the start of their gather to the end of what computes with them; in 2 and 3
    its gradients, from the start of its backward to the end of their reduce-scatter.
    """
    extra = unit_bytes * (1 - 1 / num_shards)
    spans: list[tuple[float, float]] = []
    opened: dict[tuple[str, int], list[float]] = defaultdict(list)  # starts of what has not ended, in their order
    for task, (start_s, end_s) in zip(tasks, times):
        if zero_stage == 3 and task.op == "all_gather":
            opened["parameters", task.unit].append(start_s)
        if zero_stage == 3 and task.stream == "compute":
            spans.append((opened["parameters", task.unit].pop(0), end_s))
        if zero_stage >= 2 and task.op == "backward":
            opened["gradients", task.unit].append(start_s)
        if zero_stage >= 2 and task.op == "reduce_scatter":
            spans.append((opened["gradients", task.unit].pop(0), end_s))
    return extra * max((sum(start <= at < end for start, end in spans) for at, _ in spans), default=0)
