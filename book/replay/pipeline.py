"""L2: a recorded pipeline: the order in which its ranks ran their actions, and how much of the time they were idle.

Ranks that share a few cores slow one another down, so their measured durations say nothing. The order is still valid.
"""
from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from book.cost import Link
from book.schedule import KINDS, Action, PipelineSchedule
from book.simulate import simulate_pipeline
from book.trace import Event, Trace

NOTHING = ("this trace has no forwards and backwards of stages: run them inside `with stage_action(...)`, or torch's "
           "stages inside `with follow_stages(...)`, and launch with record=True")


@dataclass(frozen=True)
class Bubble:
    """How much of a pipeline's time is lost: `share` is the idle part of all ranks' time together, from 0 to 1.

    `step_s` is from the first action's start to the last one's end, `busy_s` how long each rank computes in it,
    `idle_s` the rest.
    """

    step_s: float
    busy_s: tuple[float, ...]

    @property
    def idle_s(self) -> tuple[float, ...]:
        """Seconds in which each rank does nothing."""
        return tuple(self.step_s - busy_s for busy_s in self.busy_s)

    @property
    def share(self) -> float:
        """The idle part of the ranks' time."""
        return sum(self.idle_s) / (self.step_s * len(self.busy_s)) if self.step_s else 0.0


def bubble(trace: Trace) -> Bubble:
    """The idle time of a simulated or replayed pipeline, or of one recorded with a machine per rank.

    Raises ValueError for a trace without actions, or with actions that have no time.
    """
    actions = list(_actions(trace))
    if not actions:
        raise ValueError(NOTHING)
    if any(None in (event.start_s, event.end_s) for event in actions):
        raise ValueError(f"a {trace.clock} clock has no times to find idle ones in: simulate or replay the pipeline")
    times = [event.times_s for event in actions]
    step_s = max(end_s for _, end_s in times) - min(start_s for start_s, _ in times)
    busy_s = np.bincount([event.rank for event in actions], [end_s - start_s for start_s, end_s in times],
                         minlength=trace.world_size)
    return Bubble(step_s, tuple(busy_s.tolist()))


def pipeline_order(trace: Trace, step: int = 0, ranks: Sequence[int] | None = None) -> PipelineSchedule:
    """The order in which the ranks of a recorded pipeline ran their actions, as a schedule.

    `step` selects one of several training steps: a new one begins when a rank repeats an action. `ranks` are those of
    one pipeline if several replicas ran; they become ranks 0, 1, ... of the schedule. A failed run has an incomplete
    order. Raises ValueError for a trace without actions, or without that step.
    """
    chosen = list(range(trace.world_size)) if ranks is None else list(ranks)
    actions = [_action(place, event)
               for place, rank in enumerate(chosen) for event in _step(trace, rank, step)]
    if not actions:
        raise ValueError(NOTHING if not any(True for _ in _actions(trace)) else
                         f"this run has no step {step} on ranks {chosen}: steps count from 0")
    num_stages, num_micro_batches = (max(getattr(action, name) for action in actions) + 1
                                     for name in ("stage", "micro_batch"))
    return PipelineSchedule(trace.name or "pipeline", num_stages, num_micro_batches, actions, len(chosen))


def replay_pipeline(trace: Trace, forward_s: float, backward_s: float, weight_s: float | None = None,
                    link: Link | None = None, *, step: int = 0) -> Trace:
    """The recorded order of a pipeline, with durations as `simulate_pipeline` takes them, from 0 s.

    The same program always has the same replay, whatever its measured times. Raises what `pipeline_order` and
    `simulate_pipeline` raise.
    """
    modelled = simulate_pipeline(pipeline_order(trace, step), forward_s, backward_s, weight_s, link)
    return Trace(modelled.events, modelled.world_size, "modelled", trace.source, name=trace.name, backend=trace.backend)


def _actions(trace: Trace) -> Iterator[Event]:
    computed = trace.of_kind("compute")
    if computed.has("stage"):
        yield from (event for event in computed if event.op in KINDS and None not in (event.stage, event.micro_batch))


def _action(place: int, event: Event) -> Action:
    assert event.stage is not None and event.micro_batch is not None and event.op is not None  # as _actions chooses
    return Action(place, event.stage, event.micro_batch, event.op)


def _step(trace: Trace, rank: int, wanted: int) -> list[Event]:
    """The actions of one rank in one training step, in the order in which they started."""
    own = [event for event in _actions(trace) if event.rank == rank]
    if trace.clock != "logical":
        own.sort(key=lambda event: event.start_s or 0.0)
    step, found = 0, []
    seen: set[tuple[int | None, int | None, str | None]] = set()
    for event in own:
        what = event.stage, event.micro_batch, event.op
        if what in seen:
            step += 1
            seen.clear()
        seen.add(what)
        if step == wanted:
            found.append(event)
    return found
