"""L2: collectives and pipelined training steps on a mesh of ranks, for the mesh explorer to play.

The ranks of a mesh do what its axes are for: along "pp" goes a pipeline, the ranks of a "tp" group all-reduce inside
each forward and backward, and those of a "dp" group all-reduce their gradients at the end. Times only give each rank's
order: a forward takes a second, a backward two.
"""
from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from book.cost import Link
from book.mesh import Mesh
from book.schedule import PipelineSchedule, ScheduleError
from book.simulate.pipeline import simulate_pipeline
from book.trace import Event, Trace

FORWARD_S, BACKWARD_S, MESSAGE = 1.0, 2.0, Link(1e-3, float("inf"))


def simulate_groups(mesh: Mesh, num_bytes: float, *axes: str) -> Trace:
    """The trace of one all-reduce in every group of each of these axes, axis by axis, on a buffer of `num_bytes`.

    Raises MeshError for an axis that the mesh does not have.
    """
    events = [_all_reduce(rank, group, num_bytes, float(place))
              for place, axis in enumerate(axes) for group in mesh.groups(axis) for rank in group]
    return Trace(events, mesh.world_size, "modelled", "simulated", name="all_reduce")


def simulate_hybrid(schedule: PipelineSchedule, mesh: Mesh, activation_bytes: float, gradient_bytes: Sequence[float],
                    num_all_reduces: int = 2) -> Trace:
    """The trace of a step in which each pipeline of a mesh (pp, and dp and tp if it has them) runs `schedule`.

    Each output and each gradient that goes to another stage has `activation_bytes`, as has each of the
    `num_all_reduces` along tp in a forward and in a backward; at its end each rank all-reduces along dp what
    `gradient_bytes` has for its place on pp. Raises MeshError for a mesh without pp, ScheduleError where its pipelines
    have not as many ranks as `schedule`.
    """
    if mesh.size("pp") != schedule.world_size:
        raise ScheduleError(f"{schedule.name} has {schedule.world_size} ranks, and pp has {mesh.size('pp')}")
    one = simulate_pipeline(schedule, FORWARD_S, BACKWARD_S, link=MESSAGE, num_bytes=activation_bytes)
    last_s = max(event.times_s[1] for event in one.events)
    events = [placed for pipeline in mesh.groups("pp") for event in one.events
              for placed in _placed(event, pipeline, mesh, activation_bytes, num_all_reduces)]
    events += [_all_reduce(rank, mesh.group_of(rank, "dp"), num_bytes, last_s + 1)
               for pipeline in mesh.groups("pp") for rank, num_bytes in zip(pipeline, gradient_bytes, strict=True)
               if "dp" in mesh.axes]
    events.sort(key=lambda event: event.times_s)
    return Trace(events, mesh.world_size, "modelled", "simulated", name=schedule.name)


def _placed(event: Event, pipeline: tuple[int, ...], mesh: Mesh, num_bytes: float, num: int) -> Iterator[Event]:
    """An event of one pipeline on the ranks where the mesh has it, and the collectives along tp inside it."""
    rank = pipeline[event.rank]
    yield replace(event, rank=rank, peer=None if event.peer is None else pipeline[event.peer])
    if event.kind == "compute" and "tp" in mesh.axes:
        start_s, end_s = event.times_s
        for place in range(num):
            at_s = start_s + (end_s - start_s) * (place + 1) / (num + 2)
            yield replace(_all_reduce(rank, mesh.group_of(rank, "tp"), num_bytes, at_s), end_s=at_s)


def _all_reduce(rank: int, group: tuple[int, ...], num_bytes: float, start_s: float) -> Event:
    return Event(rank, "collective", "all_reduce", group=group, num_bytes=num_bytes, start_s=start_s,
                 end_s=start_s + 0.5)
