"""L3: the pipeline player on a page and in a notebook: one schedule or recorded run, a choice of them, or a race."""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING, Any

from book.schedule import PipelineSchedule
from book.trace import Trace
from book.widgets.page import Page, arranged, check_choice, each_once, heading, listed, mapping, names_of
from book.widgets.pipeline_run import Pipeline, figures, read_pipeline, run_payload
from book.widgets.show import show
from book.words import counted

if TYPE_CHECKING:
    from book.widgets.live import Live

Piped = Trace | PipelineSchedule


def pipeline_player(what: Piped | Mapping[Any, Piped] | Sequence[Piped], *, ranks: Sequence[int] | None = None,
                    title: str | None = None, labels: Sequence[str] | None = None,
                    select: Any = None) -> PipelinePlayer | Live:
    """The player of a pipeline, or of several that the reader chooses from by the mapping's keys.

    `what` is a modelled trace (simulate_pipeline, replay_pipeline), which has its own durations; or a schedule, or a
    recorded trace, in whose order a forward takes 1 ms and a backward 2 ms: `ranks` says which pipeline of it, as in
    replay_pipeline. An order that is incomplete or gets stuck is shown as far as it goes. `labels` name the choices and
    `select` is the key to open with. Raises TypeError for anything else, ValueError for a trace without stages, more
    than 8 ranks or 2048 actions, or one that takes no time.
    """
    runs = mapping(what)
    check_choice("select", select, (None, *runs))
    return show(PipelinePlayer(runs, title, "player", labels, select, ranks))


def pipeline_race(runs: Mapping[str, Piped], *, title: str = "Pipelines on one clock") -> PipelinePlayer | Live:
    """Several pipelines, one below the other, on one clock; `runs` are what `pipeline_player` takes.

    The durations are those of the run with the fewest stages: the others cut the same model into shorter ones.
    Raises ValueError for fewer than two runs, and what `pipeline_player` raises.
    """
    if not isinstance(runs, Mapping):
        raise TypeError('a race needs names for its runs: pipeline_race({"GPipe": schedule, "1F1B": other})')
    if len(runs) < 2:
        raise ValueError("a race needs two or more runs")
    return show(PipelinePlayer(dict(runs), title, "race"))


MOST_WORDS = 40  # actions of a rank; longer orders are for the picture
TITLE = "One step of a pipeline"


class PipelinePlayer(Page):
    """What a pipeline player shows: runs by key.

    `view` is "player" (the reader chooses a run) or "race" (all of them, one below the other).
    """

    widget = "pipeline"

    def __init__(self, runs: Mapping[Any, Any], title: str | None = None, view: str = "player",
                 labels: Sequence[str] | None = None, select: Any = None, ranks: Sequence[int] | None = None):
        self._view, self._ranks = view, ranks
        self.runs: dict[Any, Pipeline] = {key: read_pipeline(what, ranks) for key, what in runs.items()}
        if view == "race":  # all runs split one model, so more stages mean shorter ones
            least = min(run.order.num_stages for run in self.runs.values())
            self.runs = {key: read_pipeline(runs[key], cut=run.order.num_stages / least)
                         for key, run in self.runs.items()}
        self.traces: dict[Any, Trace] = {key: run.trace for key, run in self.runs.items()}
        self._given_title, self.title = title, title or _title(list(self.runs.values()))
        shown = arranged({key: run_payload(run) for key, run in self.runs.items()}, labels, select, integers="run")
        self._data = {"title": self.title, "view": view, **shown}

    def with_trace(self, what: Any) -> PipelinePlayer:
        """The same player of another trace or schedule."""
        return PipelinePlayer({"": what}, self._given_title, ranks=self._ranks)

    def data(self, live: bool) -> dict[str, Any]:
        """The player's data: order and modelled times, the same on every machine, live or not."""
        return self._data

    def text(self) -> str:
        """One line that says what is shown."""
        kind = {"player": "pipeline player", "race": "pipelines on one clock"}[self._view]
        sizes = each_once(_size(run) for run in self.runs.values())
        return f"{self.title}: {kind}{self.several()}, {sizes}, {self._sources()}"

    def words(self) -> str:
        """The figures of each run and, if there is only one, its order."""
        lists = [_figures(name, run, len(self.runs) > 1) for name, run in zip(names_of(self.runs), self.runs.values())]
        order = _order(next(iter(self.runs.values()))) if len(self.runs) == 1 else ""
        return heading(self.title, self._sources()) + "".join(lists) + order

    def _sources(self) -> str:
        return each_once(run.source for run in self.runs.values())


def _title(runs: Sequence[Pipeline]) -> str:
    """A title from what all runs have in common."""
    known = {run.known.name if run.known else None for run in runs}
    name = known.pop() if len(known) == 1 else None
    sizes = {_stages(run) for run in runs}
    size = sizes.pop() if len(sizes) == 1 else None
    parts = [part for part in (name, size) if part]
    return f"Pipeline: {', '.join(parts)}" if parts else TITLE


def _stages(run: Pipeline) -> str:
    return f"{counted(run.order.num_stages, 'stage')}, {counted(run.order.num_micro_batches, 'micro-batch')}"


def _size(run: Pipeline) -> str:
    return f"{counted(run.order.world_size, 'rank')}, {_stages(run)}"


def _figures(name: str, run: Pipeline, named: bool) -> str:
    rows = [f"{value}: {meaning}" for value, meaning in figures(run)]
    return (f"<p>{escape(name)}</p>" if named else "") + listed(rows + run.ends, "ul")


def _order(run: Pipeline) -> str:
    """Each rank's actions, if they are few."""
    orders = [run.order.of_rank(rank) for rank in range(run.order.world_size)]
    if max(map(len, orders)) > MOST_WORDS:
        return ""
    several = run.order.num_stages > run.order.world_size
    rows = [f"<tr><th>rank {rank}</th><td>{' '.join(_word(action, several) for action in actions)}</td></tr>"
            for rank, actions in zip(run.ranks or range(len(orders)), orders)]
    how = "stage, kind and micro-batch" if several else "kind and micro-batch"
    return f"<p>The order of each rank ({how}):</p><table>{''.join(rows)}</table>"


def _word(action: Any, with_stage: bool) -> str:
    return (f"{action.stage}" if with_stage else "") + f"{action.kind}{action.micro_batch}"
