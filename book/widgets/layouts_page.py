"""L3: the chart of layouts on a page and in a notebook."""
from __future__ import annotations

from html import escape
from typing import Any

from book.cost import Search, usable_bytes
from book.widgets.layouts_data import layouts_payload
from book.widgets.page import Page
from book.widgets.units import in_bytes, in_seconds, percent


class LayoutChart(Page):
    """What a chart of layouts shows: all that a search found, thinned out."""

    widget = "layouts"

    def __init__(self, found: Search, title: str | None = None):
        if not isinstance(found, Search):
            raise TypeError(f"layout_chart() takes what search(...) returns, not {type(found).__name__}")
        if not len(found):
            raise ValueError("this search found no layout: nothing divides its GPUs, layers, heads and batch")
        self.found, self.traces, self._given_title = found, {}, title
        number = found.model.num_parameters
        size = f"{number / 1e9:.3g} billion" if number >= 1e9 else f"{number / 1e6:.3g} million"
        self.title = title or f"{size} parameters on {found.cluster.num_gpus:,} GPUs"

    def with_trace(self, what: Any) -> LayoutChart:
        """The same chart of another search."""
        return LayoutChart(what, self._given_title)

    def data(self, live: bool) -> dict[str, Any]:
        """The chart's data, live or not: all of it is modelled."""
        return {"v": 1, "title": self.title, **layouts_payload(self.found)}

    def text(self) -> str:
        """One line that says what is shown."""
        return f"{self.title}: {len(self.found):,} layouts, {int(self.found.fits.sum()):,} fit, modelled"

    def words(self) -> str:
        """How many layouts there are, and a table of the front among those that fit (of all, where none does)."""
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
