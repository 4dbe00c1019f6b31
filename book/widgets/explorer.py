"""L3: what explorers share: dials that the reader turns, and a simulation in the page that answers.

Each explorer is a class in traffic_explorers or step_explorers, with its dials and a table for readers without
JavaScript, and a kind in the script of that name: a function that answers, one that draws, and one that tells.

The data of an explorer have its `dials`: for each its `key`, `label` and `unit`, the `values` that it can have, and
`at`, the place of the one to start with, which the text around it speaks of. explorer.js says what the units are.
"""
from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from book.trace import Trace
from book.widgets.page import Page


@dataclass(frozen=True)
class Dial:
    """Values in order, one of them chosen.

    `unit` is "" for a number or a word, "B", "KiB", "s", "B/s", "x" for a factor, "word" for one of some words as
    buttons, or what stands behind the number.
    """

    key: str
    label: str
    values: tuple[Any, ...]
    value: Any
    unit: str = ""

    def data(self) -> dict[str, Any]:
        """The dial as JSON data; a value that is not among the others is put in its place."""
        values = list(self.values)
        if self.value not in values:
            values = sorted([*values, self.value])
        short = [int(v) if isinstance(v, float) and v.is_integer() else v for v in values]
        return {"key": self.key, "label": self.label, "unit": self.unit, "values": short,
                "at": values.index(self.value)}

    def check(self, where: str) -> None:
        """Raise ValueError for a value that can't be chosen: one out of range, or one that is not among a list."""
        if self.unit == "word" or isinstance(self.value, str):
            if self.value not in self.values:
                raise ValueError(f"{where}: {self.label} can't be {self.value!r}: use one of "
                                 f"{', '.join(map(str, self.values))}")
        elif not self.values[0] <= self.value <= self.values[-1] or (not self.unit and self.value not in self.values):
            which = "" if self.unit else f": use one of {', '.join(map(str, self.values))}"
            raise ValueError(f"{where}: {self.label} can be {self.values[0]:g} to {self.values[-1]:g}, not "
                             f"{self.value!r}{which}")


def decades(lowest: int, highest: int) -> tuple[float, ...]:
    """Values from 10**lowest to 10**highest, eight in each decade."""
    values = [float(f"{step}e{ten}") for ten in range(lowest, highest) for step in (1, 1.5, 2, 3, 4, 5, 6, 8)]
    return (*values, float(f"1e{highest}"))


class Explorer(Page):
    """A page whose script answers what the reader chooses; its first answer is made here, for pages without scripts.

    Raises ValueError for a dial's value that a reader can't choose.
    """

    def __init__(self, title: str, dials: Iterable[Dial]):
        self.title, self.dials, self.traces = title, tuple(dials), {}
        for dial in self.dials:
            dial.check(self.widget)

    def with_trace(self, what: Trace) -> Explorer:
        """Refuse: an explorer simulates what the reader chooses. Raises TypeError."""
        raise TypeError(f"{self.widget}() simulates what the reader chooses: play(trace) shows a trace")

    def data(self, live: bool) -> dict[str, Any]:
        """The dials, and where they stand at first."""
        return {"title": self.title, "dials": [dial.data() for dial in self.dials]}
