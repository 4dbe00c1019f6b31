"""L3: a pipeline's order and modelled times as the small JSON that the pipeline player draws.

A run has, in addition to what scene.js says about all runs,

    n, stages    how many ranks, and which stages each of them runs
    who          the ranks' numbers, which are not 0, 1, ... if it is one pipeline of several
    batches      the number of its micro-batches
    step_s       what `ticks` ticks are, the unit of all its times
    actions      for each rank its actions, [stage, kind, micro-batch, start, end], and when the result leaves and
                 arrives, if it goes to another rank
    ends         for an order that is incomplete or cannot continue: where each rank stands
    brief        the most important figures in one line
"""
from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cached_property
from typing import Any

from book.cost import pipeline_bubble
from book.pipelines import gpipe, interleaved, one_f_one_b, zero_bubble
from book.replay import Bubble, bubble, pipeline_order
from book.schedule import Action, PipelineSchedule, ScheduleError
from book.simulate import simulate_pipeline
from book.trace import Event, Trace
from book.widgets.terms import origin, percent
from book.words import in_seconds

MOST_RANKS, MOST_ACTIONS = 8, 2048
MOST_TICKS = 100_000
FORWARD_S, BACKWARD_S, RATIO = 1e-3, 2e-3, "B = 2F"  # of a stage; a modelled trace has its own
RESULTS = {"F": "output", "B": "gradient", "I": "gradient"}  # what an action gives another stage
KNOWN = ((gpipe, "GPipe", "(p−1)/(m+p−1)"), (one_f_one_b, "1F1B", "(p−1)/(m+p−1)"),
         (interleaved, "interleaved 1F1B", "(p−1)/(vm+p−1)"), (zero_bubble, "ZB-V", ""))


def timed(order: PipelineSchedule, cut: float = 1.0) -> Trace:
    """The trace of an order whose backwards take two forwards; in a model `cut` into more stages, all take less."""
    return simulate_pipeline(order, FORWARD_S / cut, BACKWARD_S / cut)


@dataclass(frozen=True)
class Pipeline:
    """One run of the player: the order of its actions, their modelled times, and where both come from.

    `ends` says where each rank stands if the order is incomplete. `ranks` are the ranks' numbers in the run if these
    are not 0, 1, ... as in the order.
    """

    order: PipelineSchedule
    trace: Trace
    source: str
    ends: list[str] = field(default_factory=list)
    ranks: Sequence[int] | None = None

    @cached_property
    def known(self) -> Known | None:
        """Which of the well-known schedules it is; None if it is none of them."""
        return known_as(self.order)

    @cached_property
    def bubble(self) -> Bubble:
        """Its idle time."""
        return bubble(self.trace)


def read_pipeline(what: Any, ranks: Sequence[int] | None = None, cut: float = 1.0) -> Pipeline:
    """The run that a schedule, a modelled trace or a recorded one stands for, of its `ranks`; `cut` as in `timed`.

    Raises TypeError for something else, ValueError for a trace without actions of stages, for more than can be drawn,
    and if nothing takes time. An order that cannot run to its end is shown as far as it goes.
    """
    if isinstance(what, PipelineSchedule):
        order, ends = _as_far_as_it_goes(what)
        run = Pipeline(order, timed(order, cut), f"simulated · {RATIO}", ends)
    elif isinstance(what, Trace):
        order = pipeline_order(what, ranks=ranks)
        modelled = what.clock == "modelled" and ranks is None
        run = Pipeline(order, what if modelled else timed(order, cut), _source(what), _standing(order, ranks), ranks)
    else:
        raise TypeError("a pipeline player takes a PipelineSchedule or a Trace of one, or a mapping of them, not "
                        f"{type(what).__name__}")
    _check_size(run)
    return run


def run_payload(run: Pipeline) -> dict[str, Any]:
    """One run as JSON data."""
    order, num_ranks = run.order, run.order.world_size
    computed = {(e.stage, e.micro_batch, e.op): e for e in run.trace.of_kind("compute")}
    events = [[computed[a.stage, a.micro_batch, a.kind] for a in order.of_rank(rank)] for rank in range(num_ranks)]
    sent = {(e.stage, e.micro_batch, e.op): e for e in run.trace.of_kind("send")}
    clock = _Clock.of(event for own in events for event in own)
    return {"n": num_ranks, "stages": [stages_of(order, rank) for rank in range(num_ranks)],
            "who": list(run.ranks or range(num_ranks)), "batches": order.num_micro_batches, "source": run.source,
            "step_s": float(f"{clock.step_s:.6g}"), "ticks": clock.ticks,
            "actions": [[_action(event, sent, clock) for event in own] for own in events],
            **({"ends": run.ends} if run.ends else {}), "figures": figures(run), "brief": brief(run)}


def _action(event: Event, sent: Mapping[Any, Event], clock: _Clock) -> list[Any]:
    """An action as JSON data."""
    message = sent.get((event.stage, event.micro_batch, RESULTS.get(event.op or "")))
    times = [*event.times_s, *(message.times_s if message else ())]
    return [event.stage, event.op, event.micro_batch, *map(clock.tick, times)]


def figures(run: Pipeline) -> list[tuple[str, str]]:
    """(value, meaning) of the figures that readers compare pipelines by."""
    found, known = run.bubble, run.known
    peaks, several = run.order.peak_in_flight(), run.order.world_size > 1
    idle = dict.fromkeys(in_seconds(idle_s) for idle_s in (min(found.idle_s), max(found.idle_s)))
    by_rank = "; by rank: " + ", ".join(map(str, peaks)) if len(set(peaks)) > 1 else ", on each rank" * several
    rows = [_bubble_figure(run), (in_seconds(found.step_s), "until the order ends" if run.ends else "one step takes"),
            (str(max(peaks)), f"in flight at most{by_rank}"),
            (" to ".join(idle), "idle on each rank" if several else "idle")]
    if several and known and known.formula and _agree(found.share, known.bubble()):
        rows.append((percent(known.bubble(2)), f"bubble with {2 * run.order.num_micro_batches} micro-batches"))
    return rows


def brief(run: Pipeline) -> str:
    """The figures in one line, for a view of several runs; memory is counted in a whole rank's activations."""
    found, most = run.bubble, max(run.order.peak_in_flight())
    depth = max(len(stages_of(run.order, rank)) for rank in range(run.order.world_size))
    size = f" ({most} of 1/{depth} the size)" if depth > 1 else ""
    idle = "not complete" if run.ends else f"bubble {percent(found.share)}"
    return f"{in_seconds(found.step_s)} · {idle} · at most {most / depth:g} in flight{size}"


@dataclass(frozen=True)
class Known:
    """A schedule with a name, and the formula of its bubble, "" if there is no simple one."""

    name: str
    formula: str
    num_ranks: int
    num_micro_batches: int
    stages_per_rank: int

    def bubble(self, times: int = 1) -> float:
        """What the formula gives, with `times` as many micro-batches."""
        return pipeline_bubble(self.num_ranks, times * self.num_micro_batches, self.stages_per_rank)


def known_as(order: PipelineSchedule) -> Known | None:
    """Which of the well-known schedules an order is, whatever its name; None if it is none of them."""
    depth = max(1, order.num_stages // order.world_size)
    for make, name, formula in KNOWN:
        try:
            same = make(order.num_stages, order.num_micro_batches, *[depth] * (make is interleaved))
        except ScheduleError:
            continue
        if same.world_size == order.world_size and same.actions == order.actions:
            return Known(name, formula, order.world_size, order.num_micro_batches, depth)
    return None


def stages_of(order: PipelineSchedule, rank: int) -> list[int]:
    """The stages that a rank runs, in ascending order."""
    return sorted({action.stage for action in order.of_rank(rank)})


@dataclass(frozen=True)
class _Clock:
    """Seconds in ticks: the fewest ticks that make every time a whole number, if that is possible."""

    start_s: float
    step_s: float
    ticks: int

    @classmethod
    def of(cls, events: Iterable[Event]) -> _Clock:
        times = {time_s for event in events for time_s in event.times_s}
        step_s = max(times) - min(times)
        parts = [Fraction((time_s - min(times)) / step_s).limit_denominator(MOST_TICKS) for time_s in times]
        ticks = math.lcm(*(part.denominator for part in parts))
        return cls(min(times), step_s, ticks if ticks <= MOST_TICKS else MOST_TICKS)

    def tick(self, time_s: float) -> int:
        return round((time_s - self.start_s) / self.step_s * self.ticks)


def _as_far_as_it_goes(schedule: PipelineSchedule) -> tuple[PipelineSchedule, list[str]]:
    """The actions of a schedule that can run, and where each rank stands if those are not all."""
    done: list[Action] = []
    try:
        for action in schedule.runnable():
            done.append(action)
    except ScheduleError as error:
        if not done:
            raise
        ends = list(error.waits)
    else:
        ends = _standing(schedule, None)
    order = PipelineSchedule(schedule.name, schedule.num_stages, schedule.num_micro_batches, done, schedule.world_size)
    return order, ends


def _standing(order: PipelineSchedule, ranks: Sequence[int] | None) -> list[str]:
    """Where each rank of an incomplete order stands; [] for a complete one."""
    try:
        order.check()
    except ScheduleError:
        return [f"rank {name} {_stands(order, rank)}" for rank, name in enumerate(ranks or range(order.world_size))]
    return []


def _stands(order: PipelineSchedule, rank: int) -> str:
    own, held = order.of_rank(rank), order.in_flight()[rank]
    if not own:
        return "has done nothing"
    return f"stands after {own[-1]}" + (f" with {held[-1]} in flight" if held[-1] else "")


def _source(trace: Trace) -> str:
    if trace.source == "simulated":
        return "simulated"
    how = "" if trace.clock == "modelled" else f" ({RATIO})"
    return f"order {origin(trace, with_backend=False)} · durations modelled{how}"


def _check_size(run: Pipeline) -> None:
    if run.order.world_size > MOST_RANKS or len(run.order.actions) > MOST_ACTIONS:
        raise ValueError(f"the pipeline player shows up to {MOST_RANKS} ranks and {MOST_ACTIONS} actions, and this "
                         f"pipeline has {run.order.world_size} ranks and {len(run.order.actions)} actions: take fewer "
                         "ranks or micro-batches")
    if not len(run.order.actions):
        raise ValueError("this pipeline has no actions: there is nothing to play")
    if run.bubble.step_s <= 0:
        raise ValueError("this pipeline takes no time: give forward_s or backward_s more than 0 s")


def _bubble_figure(run: Pipeline) -> tuple[str, str]:
    share, known = run.bubble.share, run.known
    if run.ends:
        return "–", "no bubble: the order is not complete"
    if known is None or not known.formula:
        return percent(share), "bubble: idle part of all ranks' time"
    if _agree(share, known.bubble()):
        return percent(share), f"bubble: {known.formula}"
    why = "messages take time" if len(run.trace.of_kind("send")) else "not all stages are equal"
    return percent(share), f"bubble; {known.formula} is {percent(known.bubble())}, but here {why}"


def _agree(share: float, formula: float) -> bool:
    return abs(share - formula) < 1e-6
