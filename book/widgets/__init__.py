"""L3: traces as animated players: `play` one, `race` several on one clock, `panel` to rerun one by hand.

    play(trace)                                  a trace or a schedule
    play({4: trace, 8: trace})                   the reader chooses; keys may be tuples: {(4, "even"): ...}
    race({"ring": trace, "tree": trace})         modelled traces side by side
    panel(run, num_ranks=(2, 4, 8))              controls, a button, and the player of what run(...) returns
    bucket_timeline(trace, replay)               a backward pass: gradients, buckets and their all-reduces on one clock
    pipeline_player(schedule_or_trace)           a pipeline: forwards, backwards, what is kept, what is idle
    pipeline_race({"GPipe": a, "1F1B": b})       several pipelines on one clock
    pipeline_game(num_stages=4)                  the reader places forwards and backwards by hand
    sharded_product(trace)                       a matrix product cut over ranks: who holds which block, what moves
    memory_player(trace)                         sharded state: what each rank holds of each unit, what is gathered
    memory_bars()                                the same by formula: model, ranks, stage and precision to choose
    mesh_explorer(trace, mesh)                   ranks on their nodes, the groups of each, a step that is played on them
    layout_chart(search(...))                    all layouts of a model on a cluster, memory against time

Each returns an object that shows itself: in a live notebook as a widget with the traits `step`, `playing`, `payload`
and `error` (and `player.trace = other`), on a static page as HTML that scripts (see assets), loaded deferred, bring to
life.
That HTML is the same for the same program: it holds logical steps and modelled times, never a measured time.

    page, live      what every widget is: a page with data and words; an anywidget around it
    assets          which scripts and styles a widget is made of; controls.js has what they share
    choices         several runs in one widget
    units, terms    bytes and times, names and counts, as their texts have them
    chunks_*, player.js                                 the chunk player: chunks_run reads its traces
    timeline, timeline_page, timeline.js                the bucket timeline
    pipeline, pipeline_page, pipeline.js; game_page, game.js        the pipeline player, race and game
    shards, shards_*, shards.js                         the sharded product
    memory_*, memory.js                                 the memory player: memory_steps reads its trace
    memory_bars, memory_bars.js                         bytes of state by formula
    mesh_*, mesh.js                                     the mesh explorer: mesh_steps reads its trace
    layouts_*, layouts.js                               the chart of layouts: layouts_data thins a search out

A widget's own modules begin with its name: `*_page` is its Page, `*_data` (or the module that has the bare name) what
is drawn, `*_words` what is said. Its script and style stand beside them; what none of them owns has no prefix.
"""
from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from book.cost import ADAM_MIXED, Link, Search, StateBytes
from book.mesh import Mesh
from book.promise import PROMISES
from book.schedule import PipelineSchedule, Schedule
from book.trace import Trace
from book.widgets.assets import ASSETS
from book.widgets.chunks_data import Options
from book.widgets.chunks_page import Shown, title_of
from book.widgets.game_page import PipelineGame
from book.widgets.layouts_page import LayoutChart
from book.widgets.memory_bars import MemoryBars
from book.widgets.memory_page import MemoryPlayer
from book.widgets.mesh_page import MeshExplorer
from book.widgets.page import Page
from book.widgets.pipeline import Durations
from book.widgets.pipeline_page import PipelinePlayer
from book.widgets.shards_page import ShardedProduct
from book.widgets.timeline_page import BucketTimeline

if TYPE_CHECKING:
    from book.widgets.live import (Game, Layouts, Memory, MemoryChoice, MeshView, Panel, PipelineView, Player, Shards,
                                   Timeline)

__all__ = ["ASSETS", "bucket_timeline", "layout_chart", "memory_bars", "memory_player", "mesh_explorer", "panel",
           "pipeline_game", "pipeline_player", "pipeline_race", "play", "race", "sharded_product"]

Playable = Trace | Schedule
Piped = Trace | PipelineSchedule


def play(what: Playable | Mapping[Any, Playable] | Sequence[Playable], *, title: str | None = None, view: str = "auto",
         predict: bool = False, clock: str = "steps", labels: Sequence[str] | None = None, select: Any = None,
         promise: str | None = None) -> Shown | Player:
    """The player of a trace or schedule, or of several that the reader chooses from by the mapping's keys.

    `view` is "ring", "matrix" or "auto" (ring up to 8 ranks); `predict` starts with the questions on; `clock` is
    "steps" or "time" (modelled traces only); `labels` name the choices and `select` is the key to open with;
    `promise` is what the run should end in, "all_reduce", "broadcast" or another of `book.promise.PROMISES`, from any
    root (default: what the trace promises; a recorded one promises nothing, and is taken for an all-reduce if anything
    is added). In a recorded run each collective of the library is a step. Raises ValueError for an unknown choice or a
    trace without chunks to play, TypeError for something that is neither.
    """
    _check("view", view, ("auto", "ring", "matrix"))
    _check("clock", clock, ("steps", "time"))
    _check("promise", promise, (None, *PROMISES))
    traces = _mapping(what)
    if clock == "time" and any(getattr(trace, "clock", None) != "modelled" for trace in traces.values()):
        raise ValueError("clock='time' needs simulated traces: simulate(schedule, num_bytes, link) gives them")
    _check("select", select, (None, *traces))
    options = Options("play", view, predict, clock, labels, select, promise)
    return _live(Shown(traces, title or title_of(traces), options))


def race(traces: Mapping[str, Playable], *, title: str = "A race on equal links",
         view: str = "auto") -> Shown | Player:
    """Several modelled runs on one clock, side by side: who is done when, and what the busiest link carries.

    Raises ValueError for fewer than two runs or one without modelled times (`simulate` gives them).
    """
    _check("view", view, ("auto", "ring", "matrix"))
    if not isinstance(traces, Mapping):
        raise TypeError("a race needs names for its runs: race({'ring': trace, 'tree': other})")
    untimed = [name for name, trace in traces.items() if not isinstance(trace, Trace) or trace.clock != "modelled"]
    if untimed:
        raise ValueError(f"a race needs simulated traces, and {untimed[0]!r} has no modelled times: "
                         "simulate(schedule, num_bytes, link) gives them")
    if len(traces) < 2:
        raise ValueError("a race needs two or more runs")
    return _live(Shown(dict(traces), title, Options("race", view, clock="time")))


def bucket_timeline(runs: Trace | Mapping[Any, Trace], replay: Callable[[Trace], Trace] | None = None, *,
                    title: str | None = None, labels: Sequence[str] | None = None,
                    select: Any = None) -> BucketTimeline | Timeline:
    """The backward pass of a recorded run, or of several that the reader chooses from, bucket by bucket.

    `runs` are traces recorded with `follow_backward`; `replay`, a book.replay.Replay, gives their events modelled
    times (a trace that it made already may stand among `runs`). The order is the recorded one. In a live notebook,
    runs on NCCL have the times that were measured. `labels` name the choices and `select` is the key to open with.
    Raises TypeError for what is no trace, ValueError for a trace without a followed backward pass, without times or
    with more than 8 ranks, and for a recorded trace without a replay.
    """
    traces = _mapping(runs if isinstance(runs, Mapping) else {"": runs})
    _check("select", select, (None, *traces))
    return _live(BucketTimeline(traces, replay, title, labels, select))


def pipeline_player(what: Piped | Mapping[Any, Piped] | Sequence[Piped], *, forward_s: float = 1e-3,
                    backward_s: float = 2e-3, weight_s: float | None = None, link: Link | None = None,
                    num_bytes: float = 0.0, step: int = 0, ranks: Sequence[int] | None = None,
                    title: str | None = None, labels: Sequence[str] | None = None,
                    select: Any = None) -> PipelinePlayer | PipelineView:
    """The player of a pipeline, or of several that the reader chooses from by the mapping's keys.

    `what` is a schedule, which is simulated with these durations; a modelled trace (simulate_pipeline,
    replay_pipeline), which has its own; or a recorded one, whose order is replayed with these: `step` and `ranks` say
    which part of it, as in replay_pipeline. An order that is not complete, or stops for good, is shown as far as it
    goes. `labels` name the choices and `select` is the key to open with. Raises TypeError for what is none of these,
    ValueError for a trace without stages, more than 8 ranks or 2048 actions, or durations that cannot be.
    """
    runs = _mapping(what)
    _check("select", select, (None, *runs))
    durations = Durations(forward_s, backward_s, weight_s, link, num_bytes)
    return _live(PipelinePlayer(runs, durations, title, "player", labels, select, step, ranks))


def pipeline_race(runs: Mapping[str, Piped], *, forward_s: float = 1e-3, backward_s: float = 2e-3,
                  weight_s: float | None = None, link: Link | None = None, num_bytes: float = 0.0,
                  title: str = "Pipelines on one clock") -> PipelinePlayer | PipelineView:
    """Several pipelines under one another on one clock; `runs` are what `pipeline_player` takes.

    The durations are those of the run with the fewest stages: the others cut the same model into shorter ones.
    Raises ValueError for fewer than two runs, and what `pipeline_player` raises.
    """
    if not isinstance(runs, Mapping):
        raise TypeError('a race needs names for its runs: pipeline_race({"GPipe": schedule, "1F1B": other})')
    if len(runs) < 2:
        raise ValueError("a race needs two or more runs")
    durations = Durations(forward_s, backward_s, weight_s, link, num_bytes)
    return _live(PipelinePlayer(dict(runs), durations, title, "race"))


def sharded_product(runs: Trace | Mapping[Any, Trace], *, title: str | None = None,
                    labels: Sequence[str] | None = None, select: Any = None) -> ShardedProduct | Shards:
    """A matrix product or MLP that ranks have cut, or several that the reader chooses from, step by step.

    `runs` are traces recorded with `trace_product` or `trace_mlp` of book.shards, which read what each block
    holds off its numbers. `labels` name the choices and `select` is the key to open with. Raises TypeError for what
    is no trace, ValueError for a trace that follows no product.
    """
    traces = _mapping(runs if isinstance(runs, Mapping) else {"": runs})
    _check("select", select, (None, *traces))
    return _live(ShardedProduct(traces, title, labels, select))


def memory_player(runs: Trace | Mapping[Any, Trace], *, title: str | None = None,
                  labels: Sequence[str] | None = None, select: Any = None) -> MemoryPlayer | Memory:
    """What each rank holds of a model's state in a training step, or in several that the reader chooses from.

    `runs` are traces recorded with book.record.follow_units; keys may be tuples such as (stage, num_ranks). `labels`
    name the choices and `select` is the key to open with. Raises TypeError for what is no trace, ValueError for a trace
    that does not say what ranks hold, whose ranks differ, or with more than 8 of them.
    """
    traces = _mapping(runs if isinstance(runs, Mapping) else {"": runs})
    _check("select", select, (None, *traces))
    return _live(MemoryPlayer(traces, title, labels, select))


def memory_bars(num_parameters: float = 7.5e9, num_ranks: int = 64, zero_stage: int = 3, *,
                each: StateBytes = ADAM_MIXED, gpu_bytes: float = 80e9,
                title: str | None = None) -> MemoryBars | MemoryChoice:
    """Bytes of state on each rank in each ZeRO stage, by the formula of `book.cost.state_bytes`.

    The arguments are what it opens with (rajbhandari2020, figure 1); the reader changes them all. Raises ValueError
    for what can't be chosen: 1 to 1024 ranks, `each` one of book.cost's three, memory of GPUs that there are.
    """
    return _live(MemoryBars(num_parameters, num_ranks, zero_stage, each, gpu_bytes, title))


def mesh_explorer(trace: Trace, mesh: Mesh, *, title: str | None = None) -> MeshExplorer | MeshView:
    """The ranks of a recorded training step on their nodes: the groups of each, and what is sent along each axis.

    The reader plays the step, reorders the axes and changes how many ranks a node has; bytes then go from coordinates
    to coordinates as they did. Forwards and backwards are told apart where the program marks them (`stage_action`); of
    several steps the first is played, and bytes are the mean. Raises TypeError for what is no trace and no mesh,
    ValueError for another number of ranks, more than 16 of them, more than 4 axes or 128 stops, a logical trace, and
    what `book.cost.flows` raises.
    """
    return _live(MeshExplorer(trace, mesh, title))


def pipeline_game(num_stages: int = 4, num_micro_batches: int = 4, *, forward_s: float = 1e-3,
                  backward_s: float = 2e-3, most_in_flight: int | None = None,
                  title: str | None = None) -> PipelineGame | Game:
    """A game: the reader places forwards and backwards, and the order is compared with GPipe and 1F1B.

    Stage r is on rank r. What cannot run is refused with the reason that `PipelineSchedule` gives; `most_in_flight`
    says how many forwards a rank has room for. In a live notebook `.schedule` is the order so far. Raises
    ScheduleError for counts below 1, ValueError for more than 8 stages or 16 micro-batches.
    """
    return _live(PipelineGame(num_stages, num_micro_batches, Durations(forward_s, backward_s), most_in_flight, title))


def layout_chart(found: Search, *, title: str | None = None) -> LayoutChart | Layouts:
    """The layouts that a search found, memory against time: a chart to filter, and what one layout's costs are made of.

    `found` is what `book.cost.search` returns. Of layouts with the same pp, tp, ZeRO stage and recomputation only the
    fastest that fits is shown, and all that no other beats in both time and memory. Raises TypeError for what is no
    search, ValueError for one that found nothing.
    """
    return _live(LayoutChart(found, title))


def panel(run: Callable[..., Trace], *, title: str | None = None, promise: str | None = None,
          **controls: Any) -> Panel:
    """Sliders and lists for the arguments of `run`, a button that calls it, and the player of the trace it returns.

    A control is a (lowest, highest) pair or a range of integers, a list of choices, or an ipywidget. `run` is called
    once with the first choices; errors of later calls are shown in the player, and clicks while it runs do nothing.
    """
    from book.widgets.live import Panel
    _check("promise", promise, (None, *PROMISES))
    return Panel(run, title, Options(promise=promise), controls)


def _live(shown: Page) -> Any:
    """The live widget; what it shows, where a page is built without the packages that a live notebook needs."""
    try:
        from book.widgets.live import LIVE
    except ImportError:
        return shown
    return LIVE[shown.widget](shown)


def _mapping(what: Any) -> dict[Any, Any]:
    if isinstance(what, Mapping):
        traces = dict(what)
    elif isinstance(what, Sequence) and not isinstance(what, str):
        traces = dict(enumerate(what, start=1))
    else:
        traces = {"": what}
    if not traces:
        raise ValueError("there is nothing to play: give at least one trace or schedule")
    return traces


def _check(name: str, value: Any, choices: tuple[Any, ...]) -> None:
    if value not in choices:
        known = ", ".join(str(choice) for choice in choices if choice is not None)
        raise ValueError(f"{name} can't be {value!r}: use one of {known}")
