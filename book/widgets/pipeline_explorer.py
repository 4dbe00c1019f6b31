"""L3: pipeline schedules with lengths that the reader chooses, simulated in the page: timeline, bubble and memory."""
from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from book import pipelines
from book.cost import Link
from book.replay import bubble
from book.schedule import PipelineSchedule
from book.simulate import simulate_pipeline
from book.widgets.explorer import Dial, Explorer
from book.widgets.page import heading, show, table
from book.widgets.terms import counted, percent

if TYPE_CHECKING:
    from book.widgets.live import Live

SCHEDULES = {"GPipe": "gpipe", "1F1B": "one_f_one_b", "interleaved": "interleaved", "ZB-V": "zero_bubble"}
RATIOS = (0.5, 0.75, 1, 1.5, 2, 2.5, 3, 4)
LINK_SHARES = (0, 0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1, 1.5, 2)
MOST_RANKS, MOST_BATCHES, MOST_PER_RANK = 16, 32, 4


def pipeline_explorer(num_ranks: int = 4, num_micro_batches: int = 8, schedule: str = "1F1B", *,
                      title: str = "How long is a pipeline's step, and what does it hold?") -> PipelineExplorer | Live:
    """A pipeline whose ranks, micro-batches, schedule, lengths of backwards and messages the reader chooses.

    The arguments are what it opens with; a backward takes two forwards, and messages no time. `schedule` is "GPipe",
    "1F1B", "interleaved" or "ZB-V". Raises ValueError unless there are 2 to 16 ranks and 1 to 32 micro-batches.
    """
    return show(PipelineExplorer(num_ranks, num_micro_batches, schedule, title))


class PipelineExplorer(Explorer):
    """What the explorer starts from; raises ValueError for what a reader can't choose."""

    widget = "pipeline_explorer"

    def __init__(self, num_ranks: int, num_micro_batches: int, schedule: str, title: str):
        dials = (
            Dial("schedule", "schedule", tuple(SCHEDULES), schedule, "word"),
            Dial("ranks", "ranks", tuple(range(2, MOST_RANKS + 1)), num_ranks),
            Dial("batches", "micro-batches", tuple(range(1, MOST_BATCHES + 1)), num_micro_batches),
            Dial("per_rank", "stages on a rank", tuple(range(1, MOST_PER_RANK + 1)), 1),
            Dial("ratio", "backward / forward", RATIOS, 2),
            Dial("link", "message / forward", LINK_SHARES, 0))
        for dial in dials:
            if dial.value not in dial.values:
                raise ValueError(f"pipeline_explorer: {dial.label} can't be {dial.value!r}: use one of "
                                 f"{', '.join(map(str, dial.values))}")
        super().__init__(title, dials)
        self.num_ranks, self.num_micro_batches, self.schedule = num_ranks, num_micro_batches, schedule

    def data(self, live: bool) -> dict[str, Any]:
        """The dials, and the schedules by the names of their functions."""
        return {**super().data(live), "schedules": SCHEDULES}

    def text(self) -> str:
        """One line that says what is shown."""
        return f"{self.title} {', '.join(SCHEDULES)} on {self._size()}"

    def words(self) -> str:
        """Step, bubble and most in flight of each schedule that these counts allow."""
        rows = [(name, *figures) for name, make in SCHEDULES.items()
                if (figures := self._figures(getattr(pipelines, make)))]
        head = ("schedule", "step, in forwards of one rank", "bubble", "most in flight, in a rank's activations")
        return heading(self.title, f"simulated, {self._size()}") + table(rows, head)

    def _figures(self, make: Callable[..., PipelineSchedule]) -> tuple[str, str, str] | None:
        per_rank = 2 if make in (pipelines.interleaved, pipelines.zero_bubble) else 1
        if make is pipelines.interleaved and self.num_micro_batches % self.num_ranks:
            return None
        order = make(self.num_ranks * per_rank, self.num_micro_batches)
        trace = simulate_pipeline(order, 1 / per_rank, 2 / per_rank, link=Link(0.0, 1.0))
        found, most = bubble(trace), max(order.peak_in_flight())
        return f"{found.step_s:.4g}", percent(found.share), f"{most / per_rank:g}"

    def _size(self) -> str:
        sizes = f"{counted(self.num_ranks, 'rank')}, {counted(self.num_micro_batches, 'micro-batch')}"
        return f"{sizes}, a backward takes two forwards"
