"""L3: all-reduce algorithms raced on links that the reader chooses, simulated in the page."""
from __future__ import annotations

from typing import TYPE_CHECKING, Any

from book.collectives import COLLECTIVES
from book.cost import Link
from book.simulate import simulate
from book.widgets.explorer import Dial, Explorer, decades
from book.widgets.page import heading, show, table
from book.widgets.terms import counted, in_bytes, in_seconds

if TYPE_CHECKING:
    from book.widgets.live import Live

ALGORITHMS = {"root": "parameter_server_all_reduce", "tree": "tree_all_reduce", "ring": "ring_all_reduce",
              "halving–doubling": "halving_doubling_all_reduce"}
MOST_RANKS = 64
TOLD_BYTES = (1e3, 1e5, 1e7)  # what the table for readers without JavaScript has beside the chosen size


def race_explorer(num_ranks: int = 4, num_bytes: float = 400e6, link: Link | None = None, *,
                  title: str = "Which all-reduce is fastest?") -> RaceExplorer | Live:
    """Root, tree, ring and halving-doubling on a clock and against size: the reader chooses ranks, size and links.

    The arguments are what it opens with, `link` by default 10 us and 12.5 GB/s. One link and one rank can be made slow.
    Raises ValueError unless there are 2 to 64 ranks, and for sizes and links outside of 1 kB to 10 GB, 100 ns to 10 ms
    and 10 MB/s to 1 TB/s.
    """
    return show(RaceExplorer(num_ranks, num_bytes, link or Link(10e-6, 12.5e9), title))


class RaceExplorer(Explorer):
    """What the race starts from; raises ValueError for what a reader can't choose."""

    widget = "race_explorer"

    def __init__(self, num_ranks: int, num_bytes: float, link: Link, title: str):
        dials = (
            Dial("ranks", "ranks", tuple(range(2, MOST_RANKS + 1)), num_ranks),
            Dial("num_bytes", "buffer", decades(3, 10), num_bytes, "B"),
            Dial("latency_s", "latency", decades(-7, -2), link.latency_s, "s"),
            Dial("bandwidth_bytes_per_s", "bandwidth", decades(7, 12), link.bandwidth_bytes_per_s, "B/s"),
            Dial("slow_link", "link 0–1 slower", (1, 1.5, 2, 3, 4, 5, 8, 10, 20, 50, 100), 1, "x"),
            Dial("slow_rank", "rank 1 slower", (1, 1.25, 1.5, 2, 3, 4, 5, 8, 10), 1, "x"))
        for dial in dials:
            if not dial.values[0] <= dial.value <= dial.values[-1] or (not dial.unit and dial.value not in dial.values):
                raise ValueError(f"race_explorer: {dial.label} can be {dial.values[0]:g} to {dial.values[-1]:g}, not "
                                 f"{dial.value!r}")
        super().__init__(title, dials)
        self.num_ranks, self.num_bytes, self.link = num_ranks, num_bytes, link

    def data(self, live: bool) -> dict[str, Any]:
        """The dials, and the algorithms by the names of their functions."""
        return {**super().data(live), "algorithms": list(ALGORITHMS.items())}

    def text(self) -> str:
        """One line that says what is shown."""
        return f"{self.title} {', '.join(ALGORITHMS)} on {self._size()}"

    def words(self) -> str:
        """The time of each algorithm at several sizes."""
        sizes = sorted({*TOLD_BYTES, self.num_bytes})
        rows = [(in_bytes(size), *(in_seconds(self._duration_s(name, size)) for name in ALGORITHMS.values()))
                for size in sizes]
        return heading(self.title, f"simulated, {self._size()}") + table(rows, ("buffer", *ALGORITHMS))

    def _duration_s(self, name: str, num_bytes: float) -> float:
        schedule = COLLECTIVES[name].schedule(self.num_ranks)
        return simulate(schedule, num_bytes, self.link, contributions=False).duration_s or 0.0

    def _size(self) -> str:
        speed = f"{in_seconds(self.link.latency_s)} and {in_bytes(self.link.bandwidth_bytes_per_s)}/s a link"
        return f"{counted(self.num_ranks, 'rank')}, {speed}"
