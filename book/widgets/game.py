"""L3: the pipeline game on a page and in a notebook: the reader places forwards and backwards by hand."""
from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from book.pipelines import gpipe, one_f_one_b
from book.schedule import Action, PipelineSchedule, check_counts
from book.trace import Trace
from book.widgets.page import Page, heading, listed
from book.widgets.pipeline_run import BACKWARD_S, FORWARD_S, MOST_RANKS, RATIO, Pipeline, brief, read_pipeline, timed
from book.widgets.show import show
from book.widgets.terms import percent
from book.words import counted, in_seconds

if TYPE_CHECKING:
    from book.widgets.live import Live


def pipeline_game(num_stages: int = 4, num_micro_batches: int = 4) -> PipelineGame | Live:
    """A game: the reader places forwards and backwards, and the order is compared with GPipe and 1F1B.

    Stage r is on rank r. An action that cannot run is refused with the reason that `PipelineSchedule` gives. In a live
    notebook `.schedule` is the order so far. Raises ScheduleError for counts below 1, ValueError for more than 8 stages
    or 16 micro-batches.
    """
    return show(PipelineGame(num_stages, num_micro_batches))


MOST_BATCHES = 16
TITLE, SOURCE = "Place the forwards and backwards yourself", f"modelled · {RATIO}"


class PipelineGame(Page):
    """What a game shows: an empty pipeline, and the schedules to compare with.

    Raises ScheduleError for counts below 1, ValueError for more than 8 stages or 16 micro-batches.
    """

    widget = "game"

    def __init__(self, num_stages: int, num_micro_batches: int):
        check_counts(num_stages=num_stages, num_micro_batches=num_micro_batches)
        if num_stages > MOST_RANKS or num_micro_batches > MOST_BATCHES:
            raise ValueError(f"the game has up to {MOST_RANKS} stages and {MOST_BATCHES} micro-batches, not "
                             f"{num_stages} and {num_micro_batches}: more are too many to place by hand")
        self.num_stages, self.num_micro_batches = num_stages, num_micro_batches
        self.title = TITLE
        self.traces: dict[Any, Trace] = {}
        self._known = {"GPipe": read_pipeline(gpipe(num_stages, num_micro_batches)),
                       "1F1B": read_pipeline(one_f_one_b(num_stages, num_micro_batches))}

    def schedule(self, placed: str) -> PipelineSchedule:
        """What was placed, a JSON list of [rank, kind, micro-batch], as a schedule: stage r is on rank r."""
        actions = [Action(rank, rank, micro_batch, kind) for rank, kind, micro_batch in json.loads(placed)]
        return PipelineSchedule("placed", self.num_stages, self.num_micro_batches, actions, self.num_stages)

    def simulate(self, placed: str) -> Trace:
        """The trace of what was placed."""
        return timed(self.schedule(placed))

    def with_trace(self, what: Any) -> PipelineGame:
        """Refuse: what a game shows is placed by hand."""
        raise TypeError("a game shows what was placed by hand: use pipeline_player to show a trace")

    def data(self, live: bool) -> dict[str, Any]:
        """Sizes, durations in seconds, and the known schedules with their figures."""
        known = [{"name": name, "order": self._order(run), "step_s": run.bubble.step_s,
                  "peaks": run.order.peak_in_flight(), "row": self._row(name, run)}
                 for name, run in self._known.items()]
        return {"title": self.title, "n": self.num_stages, "batches": self.num_micro_batches,
                "source": SOURCE, "forward_s": FORWARD_S, "backward_s": BACKWARD_S, "known": known}

    def text(self) -> str:
        """One line that says what is shown."""
        return f"{self.title}: pipeline game, {self._size()}, {SOURCE}"

    def _order(self, run: Pipeline) -> list[list[tuple[str, int]]]:
        """What each rank runs."""
        return [[(action.kind, action.micro_batch) for action in run.order.of_rank(rank)]
                for rank in range(self.num_stages)]

    def _row(self, name: str, run: Pipeline) -> list[str]:
        return [name, in_seconds(run.bubble.step_s), percent(run.bubble.share),
                ", ".join(map(str, run.order.peak_in_flight()))]

    def _size(self) -> str:
        return f"{counted(self.num_stages, 'stage')}, {counted(self.num_micro_batches, 'micro-batch')}"

    def words(self) -> str:
        """The rules, and what the known schedules reach."""
        known = listed((f"{name}: {brief(run)}" for name, run in self._known.items()), "ul")
        stages, batches = counted(self.num_stages, "stage"), counted(self.num_micro_batches, "micro-batch")
        return (f"{heading(self.title, SOURCE)}<p>{stages}, one on each rank; every one runs {batches} forward and "
                "back. A forward needs the output of the stage before, a backward its own forward and the gradient of "
                f"the stage after. To beat:</p>{known}")
