"""L3: the chart of layouts on a page and in a notebook, and the layouts in it as small numbers.

Of all layouts with the same pp, tp, cp, ep, ZeRO stage and recomputation only the fastest that fits is shown, or the
smallest if none fits. Nothing of the front is left out: whatever those are, the fastest layout that fits is shown.
"""
from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING, Any

import numpy as np

from book.cost import Search, usable_bytes
from book.cost.step import PARTS
from book.widgets.page import Page
from book.widgets.show import show
from book.widgets.terms import percent
from book.words import in_bytes, in_seconds, rounded

if TYPE_CHECKING:
    from book.widgets.live import Live


def layout_chart(found: Search, *, title: str | None = None) -> LayoutChart | Live:
    """The layouts that a search found, memory against time: a chart to filter, and what one layout's costs are made of.

    `found` is what `book.cost.search` returns. Of layouts with the same pp, tp, cp, ep, ZeRO stage and recomputation
    only the fastest that fits is shown, and all layouts that no other beats in both time and memory. Raises TypeError
    for anything but a search, ValueError for one that found nothing.
    """
    return show(LayoutChart(found, title))


class LayoutChart(Page):
    """What a chart of layouts shows: a selection of all that a search found."""

    widget = "layouts"

    def __init__(self, found: Search, title: str | None = None):
        if not isinstance(found, Search):
            raise TypeError(f"layout_chart() takes what search(...) returns, not {type(found).__name__}")
        if not len(found):
            raise ValueError("this search found no layout: nothing divides its GPUs, layers, heads and batch")
        self.found, self.traces, self._given_title = found, {}, title
        self.title = title or f"{rounded(found.model.num_parameters)} parameters on {found.cluster.num_gpus:,} GPUs"

    def with_trace(self, what: Any) -> LayoutChart:
        """The same chart of another search."""
        return LayoutChart(what, self._given_title)

    def data(self, live: bool) -> dict[str, Any]:
        """The chart's data, live or not: all of it is modelled."""
        return {"title": self.title, **layouts_payload(self.found)}

    def text(self) -> str:
        """One line that says what is shown."""
        return f"{self.title}: {len(self.found):,} layouts, {int(self.found.fits.sum()):,} fit, modelled"

    def words(self) -> str:
        """How many layouts there are, and a table of the front among those that fit (of all, if none fits)."""
        found, front = self.found, self.found.front()
        front = front[found.fits[front]] if found.fits.any() else front
        rows = "".join(self._row(int(position)) for position in front)
        head = "".join(f"<th>{name}</th>" for name in ("layout", "a step", "memory", "of the peak"))
        return (f"<p><strong>{escape(self.title)}</strong> (modelled): of {len(found):,} layouts "
                f"{int(found.fits.sum()):,} fit into {in_bytes(usable_bytes(found.cluster))}. No other layout beats "
                f"these in both time and memory:</p><table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>")

    def _row(self, position: int) -> str:
        cost = self.found.estimates[position]
        cells = (str(self.found.layouts[position]), in_seconds(cost.step_s), in_bytes(cost.memory_bytes),
                 percent(cost.mfu))
        return f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in cells)}</tr>"


SIZES = {"pp": "pp", "dp": "dp", "tp": "tp", "b": "micro_batch_size", "v": "stages_per_rank", "zero": "zero_stage",
         "sp": "sequence_parallel", "how": "recompute"}
RARE = {"cp": "cp", "ep": "ep", "replicas": "replicas"}  # columns only where a layout has more than one
HELD = {"state": "state_bytes", "kept": "activation_bytes", "moment": "gathered_bytes"}
UNIT_BYTES = 1e7  # a hundredth of a GB
MOST_GROUPS = 420
GROUPED = ("pp", "tp", "cp", "ep", "zero_stage", "recompute")


def shown(found: Search) -> np.ndarray:
    """Positions of the layouts in the chart, fastest first; of too many groups only the fastest."""
    step_s, memory = (found.estimates.array(name) for name in ("step_s", "memory_bytes"))
    groups = np.column_stack([found.layouts.array(name) for name in GROUPED])
    order = np.lexsort([np.where(found.fits, step_s, memory), ~found.fits, *groups.T])
    heads = order[np.concatenate([[True], (np.diff(groups[order], axis=0) != 0).any(axis=1)])]
    chosen = np.union1d(heads[np.argsort(step_s[heads], kind="stable")][:MOST_GROUPS], found.front())
    return chosen[np.lexsort([memory[chosen], step_s[chosen]])]


def layouts_payload(found: Search) -> dict[str, Any]:
    """The layouts as columns: sizes, hundredths of a GB, seconds, thousandths of a step for each of its parts."""
    chosen = shown(found)
    layouts, costs = found.layouts.take(chosen), found.estimates.take(chosen)
    step_s = costs.array("step_s")
    columns = {name: layouts.array(field).tolist() for name, field in SIZES.items()}
    columns |= {name: layouts.array(field).tolist() for name, field in RARE.items() if (layouts.array(field) > 1).any()}
    columns |= {name: np.rint(costs.array(field) / UNIT_BYTES).astype(int).tolist() for name, field in HELD.items()}
    columns["step"] = [float(f"{seconds:.4g}") for seconds in step_s]
    columns["mfu"] = np.rint(1000 * costs.array("mfu")).astype(int).tolist()
    columns["fits"] = found.fits[chosen].astype(int).tolist()
    parts = [np.rint(1000 * costs.array(part) / step_s).astype(int).tolist() for part in PARTS]
    return {"columns": columns, "parts": parts, "usable": round(usable_bytes(found.cluster) / UNIT_BYTES),
            "total": len(found), "fitting": int(found.fits.sum())}
