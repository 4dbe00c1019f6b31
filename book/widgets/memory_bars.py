"""L3: bytes of sharded state by formula: the reader chooses model, ranks, stage, precision and GPU.

The data have the choices and what is chosen at first. The page computes the bytes by the twin of
book.cost.state_bytes.
"""
from __future__ import annotations

from typing import TYPE_CHECKING, Any

from book.cost import ADAM_32, ADAM_MIXED, ADAM_MIXED_GRADIENTS_32, state_bytes
from book.trace import Trace
from book.widgets.page import Page, heading, table
from book.widgets.show import show
from book.words import counted, in_bytes

if TYPE_CHECKING:
    from book.widgets.live import Live


def memory_bars(num_parameters: float = 7.5e9, num_ranks: int = 64, zero_stage: int = 3, *,
                title: str = "Bytes of state on each rank") -> MemoryBars | Live:
    """Bytes of state on each rank in each ZeRO stage, by the formula of `book.cost.state_bytes`.

    The arguments are what it opens with (rajbhandari2020, figure 1); the reader can change them, and the precision and
    the GPU. Raises ValueError for what can't be chosen: there are 1 to 1024 ranks.
    """
    return show(MemoryBars(num_parameters, num_ranks, zero_stage, title))


MODELS = {"124 M (GPT-2)": 124e6, "1.5 B (GPT-2 XL)": 1.5e9, "7.5 B (ZeRO)": 7.5e9, "13 B": 13e9, "70 B": 70e9,
          "175 B (GPT-3)": 175e9}
PRECISIONS = {"mixed": ADAM_MIXED, "mixed, 32-bit gradients": ADAM_MIXED_GRADIENTS_32, "32 bits": ADAM_32}
GPUS = (16e9, 24e9, 40e9, 80e9, 141e9, 192e9)
MOST_RANKS, MOST_PARAMETERS = 1024, 1e13


class MemoryBars(Page):
    """What the bars show at first; raises ValueError for what a reader can't choose."""

    widget = "memory_bars"

    def __init__(self, num_parameters: float, num_ranks: int, zero_stage: int, title: str):
        if zero_stage not in range(4) or not isinstance(num_ranks, int):
            raise ValueError("memory_bars has ZeRO stages 0 to 3 and a whole number of ranks, not stage "
                             f"{zero_stage!r} and {num_ranks!r} ranks")
        if not 1 <= num_ranks <= MOST_RANKS or not 1e6 <= num_parameters <= MOST_PARAMETERS:
            raise ValueError(f"memory_bars has 1 to {MOST_RANKS} ranks and a million to {MOST_PARAMETERS:.0e} "
                             f"parameters, not {num_ranks} and {num_parameters:.3g}")
        self._stages = [state_bytes(num_parameters, stage, num_ranks, ADAM_MIXED) for stage in range(4)]
        self._chosen = {"parameters": num_parameters, "ranks": num_ranks, "stage": int(zero_stage),
                        "precision": 0, "gpu": GPUS.index(80e9)}
        self.traces, self.title = {}, title

    def with_trace(self, what: Trace) -> MemoryBars:
        """Refuse: the bars show a formula. Raises TypeError."""
        raise TypeError("memory_bars() shows a formula, no trace: memory_player(trace) shows what was recorded")

    def data(self, live: bool) -> dict[str, Any]:
        """The choices, and what is chosen."""
        return {"title": self.title, "models": list(MODELS.items()), "gpus": list(GPUS), **self._chosen,
                "most": MOST_RANKS, "precisions": [[name, each.parts] for name, each in PRECISIONS.items()]}

    def text(self) -> str:
        """One line that says what is shown."""
        return f"{self.title}: {self._size()}"

    def words(self) -> str:
        """The bytes of each stage as a table."""
        held = [(each.parameters, each.gradients, each.optimizer, each.total) for each in self._stages]
        rows = [(str(stage), *(in_bytes(size, zeros=True) for size in sizes)) for stage, sizes in enumerate(held)]
        head = ("ZeRO stage", "parameters", "gradients", "optimizer state", "each rank")
        return heading(self.title, self._size()) + table(rows, head)

    def _size(self) -> str:
        billions = self._chosen["parameters"] / 1e9
        ranks = counted(int(self._chosen["ranks"]), "rank")
        return f"{billions:g} billion parameters, {ranks}, {next(iter(PRECISIONS))}, by formula"
