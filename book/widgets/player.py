"""L3: the chunk player: traces as JSON, the player on a page and in a notebook, a race, a panel to rerun one.

A run's `contents` lists what chunks hold and messages bring, each as the times that it has the data of each rank, or
null if that is unknown; everything else names them by their place in it. `start` and `goals` have a row of them per
rank: what its chunks hold at first, and should hold at the end (null: that is left open). `transfers` has a column per
field of `Transfer`: `arrives` is null for what nobody receives, `into` for what changes no chunk of the watched buffer.
`holds`, [step, rank, chunk, contents], are changes without a message, from just before that step on. The player works
nothing out: what a chunk holds is what the trace says.
"""
from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from book.extras import require
from book.promise import PROMISES, Promise
from book.schedule import Schedule
from book.trace import Trace
from book.widgets.called import CollectivesView, is_plain
from book.widgets.page import Page, arranged, check_choice, heading, listed, mapping, names_of
from book.widgets.player_fault import Fault, ending
from book.widgets.player_run import ChunkRun, Contributions, as_trace, read_run
from book.widgets.player_words import size_of, source_of, steps_in_words, told
from book.widgets.show import show
from book.widgets.terms import spelled
from book.words import capitalised

if TYPE_CHECKING:
    from book.widgets.live import Live, Panel

Playable = Trace | Schedule


def play(what: Playable | Mapping[Any, Playable] | Sequence[Playable], *, title: str | None = None, view: str = "auto",
         predict: bool = False, clock: str = "steps", labels: Sequence[str] | None = None, select: Any = None,
         promise: str | None = None) -> PlayerView | CollectivesView | Live:
    """The player of a trace or schedule, or of several that the reader chooses from by the mapping's keys.

    `view` is "ring", "matrix" or "auto" (ring up to 8 ranks); `predict` starts with the questions on; `clock` is
    "steps" or "time" (modelled traces only); `labels` name the choices and `select` is the key to open with;
    `promise` is what the run should end in, "all_reduce", "broadcast" or another of `book.promise.PROMISES`, from any
    root (default: what the trace promises; a recorded one promises nothing, and is taken for an all-reduce if anything
    is added). In a recorded run each collective of the library is a step. Raises ValueError for an unknown choice or a
    trace without chunks to play, TypeError for anything but traces and schedules.
    """
    check_choice("view", view, ("auto", "ring", "matrix"))
    check_choice("clock", clock, ("steps", "time"))
    check_choice("promise", promise, (None, *PROMISES))
    traces = mapping(what)
    if clock == "time" and any(getattr(trace, "clock", None) != "modelled" for trace in traces.values()):
        raise ValueError("clock='time' needs simulated traces: simulate(schedule, num_bytes, link) gives them")
    check_choice("select", select, (None, *traces))
    if all(map(is_plain, traces.values())):
        return show(CollectivesView(traces, title, labels, select))
    options = Options("play", view, predict, clock, labels, select, promise)
    return show(PlayerView(traces, title or title_of(traces), options))


def race(traces: Mapping[str, Playable], *, title: str = "A race on equal links",
         view: str = "auto") -> PlayerView | Live:
    """Several modelled runs on one clock, side by side: when each is done, and what the busiest link carries.

    Raises ValueError for fewer than two runs or one without modelled times (`simulate` gives them).
    """
    check_choice("view", view, ("auto", "ring", "matrix"))
    if not isinstance(traces, Mapping):
        raise TypeError("a race needs names for its runs: race({'ring': trace, 'tree': other})")
    untimed = [name for name, trace in traces.items() if not isinstance(trace, Trace) or trace.clock != "modelled"]
    if untimed:
        raise ValueError(f"a race needs simulated traces, and {untimed[0]!r} has no modelled times: "
                         "simulate(schedule, num_bytes, link) gives them")
    if len(traces) < 2:
        raise ValueError("a race needs two or more runs")
    return show(PlayerView(dict(traces), title, Options("race", view, clock="time")))


def panel(run: Callable[..., Trace], *, title: str | None = None, promise: str | None = None,
          **controls: Any) -> Panel:
    """Sliders and lists for the arguments of `run`, a button that calls it, and the player of the trace it returns.

    A control is a (lowest, highest) pair or a range of integers, a list of choices, or an ipywidget. `run` is called
    once with the first choices; errors of later calls are shown in the player, and clicks while it runs do nothing.
    """
    require("panel", "anywidget", "ipywidgets")
    from book.widgets.live import Panel
    check_choice("promise", promise, (None, *PROMISES))

    def page_of(trace: Trace) -> PlayerView:
        return PlayerView({"": trace}, title or title_of({"": trace}), Options(promise=promise))

    return Panel(run, page_of, controls)


MODELLED_TICKS = 10_000  # in a run's duration: modelled times are written in them


@dataclass(frozen=True)
class Options:
    """How traces are played: see `play` and `race` for what each option means."""

    kind: str = "play"
    view: str = "auto"
    predict: bool = False
    clock: str = "steps"
    labels: Sequence[str] | None = None
    select: Any = None
    promise: str | None = None


def run_payload(trace: Trace, promise: str | None = None) -> dict[str, Any]:
    """One run as JSON data, without the backend: it is the same on every machine."""
    return _payload(read_run(trace), trace, promise)


def _payload(run: ChunkRun, trace: Trace, promise: str | None) -> dict[str, Any]:
    ends = ending(run, trace, promise)
    broken = {"fault": _write_fault(ends.fault, ends.promise)} if ends.fault else {}
    return {**_write(run, trace, ends.promise), "ok": ends.ok, "verdict": ends.says, **broken}


def _write(run: ChunkRun, trace: Trace, promised: Promise) -> dict[str, Any]:
    """A run as JSON data, but for how it ends; the trace says where it comes from."""
    return {"n": run.world_size, "c": run.num_chunks, "S": run.num_steps,
            **told(run, trace, promised), **_sizes(run), **_write_chunks(run, promised),
            **_write_times(run, trace), **({"unseen": True} if run.called else {})}


class Places(dict[Contributions, int]):
    """The place of each of the contents that it was asked for, in the order in which it was."""

    def __missing__(self, held: Contributions) -> int:
        return self.setdefault(held, len(self))


def _write_chunks(run: ChunkRun, promise: Promise) -> dict[str, Any]:
    """What chunks hold, should hold and exchange: see the first lines of this module."""
    size = ranks, chunks = run.world_size, run.num_chunks
    goal, where, places = promise.goal(*size), promise.where(*size), Places()
    rows: dict[str, Any] = {
        "start": [[places[run.start.get((r, c))] for c in range(chunks)] for r in range(ranks)],
        "goals": [[places[tuple(goal[r, c].tolist())] if where[r, c] else None for c in range(chunks)]
                  for r in range(ranks)],
        "transfers": {name: [getattr(t, name) for t in run.transfers]
                      for name in ("src", "dst", "chunk", "into", "op", "leaves", "arrives")},
        "holds": [[step, rank, chunk, places[held]] for step, rank, chunk, held in run.holds]}
    rows["transfers"]["sent"] = [places[t.sent] for t in run.transfers]
    rows["transfers"]["after"] = [None if t.into is None else places[t.after] for t in run.transfers]
    return {**rows, "contents": [held and [_count(times) for times in held] for held in places]}


def _count(times: float) -> float:
    return int(times) if times == int(times) else float(f"{times:.4g}")


def _write_fault(fault: Fault, promised: Promise) -> dict[str, Any]:
    """The first wrong step, what is wrong, [rank, chunk, since which step], and `right`, the run as it should be.

    `line` is the cell's: its number, function and text.
    """
    written: dict[str, Any] = {"step": fault.step, "says": fault.says, "cells": fault.cells}
    if fault.line:
        written["line"] = [str(fault.line.number), fault.line.function, fault.line.source]
    if fault.right:
        trace = Trace([], fault.right.world_size, "logical", "simulated", name=fault.name)
        written["right"] = {**_write(fault.right, trace, promised), "ok": True, "verdict": ""}
    return written


def _write_times(run: ChunkRun, trace: Trace) -> dict[str, Any]:
    """When each transfer leaves and arrives, [start, end], in ticks of the run's duration; nothing without such times.
    """
    times = [(t.start_s, t.end_s) for t in run.transfers if t.start_s is not None and t.end_s is not None]
    if trace.clock != "modelled" or not trace.duration_s or len(times) < len(run.transfers):
        return {}
    if {t.leaves for t in run.transfers} != set(range(run.num_steps)):
        return {}
    origin, duration = min(start_s for start_s, _ in times), trace.duration_s
    return {"duration_s": float(f"{duration:.6g}"),
            "times": [[round((s - origin) / duration * MODELLED_TICKS) for s in span] for span in times]}


def _sizes(run: ChunkRun) -> dict[str, Any]:
    """The buffer's bytes, and each chunk's share unless all are the same."""
    num_bytes, shares = run.num_bytes(), run.shares()
    if num_bytes is None:
        return {}
    uneven = shares.max() - shares.min() > 1e-9
    sizes = {"bytes": round(num_bytes)}
    return {**sizes, "shares": [round(x, 6) for x in shares.tolist()]} if uneven else sizes


class PlayerView(Page):
    """What a player shows: traces by key, a title, and the options of `play` or `race`."""

    widget = "player"

    def __init__(self, traces: Mapping[Any, Any], title: str, options: Options):
        self.traces = {key: as_trace(what) for key, what in traces.items()}
        self.title, self.options = title, options
        self._runs = [read_run(trace) for trace in self.traces.values()]
        self._payloads = [_payload(run, trace, options.promise) for run, trace in self._each()]
        self._data = self._arranged(self._payloads)

    def with_trace(self, what: Any) -> PlayerView:
        """The same player of another trace."""
        return PlayerView({"": what}, self.title, replace(self.options, labels=None, select=None))

    def data(self, live: bool) -> dict[str, Any]:
        """The player's data; in a live notebook with the backend's name."""
        if not live:
            return self._data
        return self._arranged([payload | {"source": source_of(trace, run, with_backend=True)}
                               for payload, (run, trace) in zip(self._payloads, self._each())])

    def _each(self) -> Iterator[tuple[ChunkRun, Trace]]:
        return zip(self._runs, self.traces.values())

    def _arranged(self, payloads: Sequence[dict[str, Any]]) -> dict[str, Any]:
        asked = self.options
        return {"kind": asked.kind, "title": self.title, "view": asked.view, "predict": asked.predict,
                "clock": asked.clock, **arranged(dict(zip(self.traces, payloads)), asked.labels, asked.select)}

    def words(self) -> str:
        """The steps of a run, if they are few; of several runs their sizes."""
        runs = self._runs
        said = steps_in_words(runs[0]) if len(runs) == 1 else listed(
            (f"{name}: {size_of(run)}" for name, run in zip(names_of(self.traces), runs)), "ul")
        return heading(self.title, self.sources()) + said

    def text(self) -> str:
        """One line that says what is shown."""
        what = f", {size_of(self._runs[0])}" if len(self._runs) == 1 else self.several()
        return f"{self.title}: player{what}, {self.sources()}"


def title_of(traces: Mapping[Any, Any]) -> str:
    """A title from the traces' name if they all have the same one."""
    names = {getattr(what, "name", None) for what in traces.values()}
    name = names.pop() if len(names) == 1 else None
    if not name:
        return "What every rank's chunks hold"
    return capitalised(spelled(name))
