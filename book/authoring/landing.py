"""L4: what the opening page has besides text: widgets that need no kernel, and the book as a map.

```{widget} ring
What stands there without JavaScript.
```

```{path}
chapters/01_ranks | | What the chapter is about.
chapters/02_data_parallel | 01_ranks | ...
```

A line of the map names a chapter, the chapters that it builds on, and what it is about. Titles come from the chapters.
"""
from __future__ import annotations

from dataclasses import dataclass
from html import escape
from pathlib import Path

from docutils import nodes
from docutils.parsers.rst import Directive
from sphinx.application import Sphinx
from sphinx.errors import SphinxError

from book.authoring.sphinx_ext import REGISTRY

NO_DATA = f'{{"v":{REGISTRY["DATA_VERSION"]}}}'  # a widget that has no data but their version



class Widget(Directive):
    """A widget that simulates what it shows; the directive's content is what a page without JavaScript has."""

    required_arguments = 1
    has_content = True

    def run(self) -> list[nodes.Node]:
        """The content between the two ends of the widget's div."""
        inside = nodes.container()
        self.state.nested_parse(self.content, self.content_offset, inside)
        begin = f"<div data-lockstep-{self.arguments[0]}='{NO_DATA}'>"
        return [nodes.raw("", begin, format="html"), *inside.children, nodes.raw("", "</div>", format="html")]


class path(nodes.General, nodes.Element):  # noqa: N801  docutils names nodes in small letters
    """The map's place in a document, until the titles of all pages are known."""


class BookPath(Directive):
    """The map of the book: see the module's docstring."""

    has_content = True

    def run(self) -> list[nodes.Node]:
        """A node that keeps the lines."""
        return [path("", lines=list(self.content))]


@dataclass(frozen=True)
class Station:
    """A chapter on the map: in which column, after all that it builds on, and in which row of it."""

    page: str
    about: str
    needs: tuple[str, ...]
    column: int
    row: float


def stations(lines: list[str]) -> list[Station]:
    """The map's chapters in the order of its lines; raises SphinxError for one that builds on none above it."""
    column: dict[str, int] = {}
    parts = [[part.strip() for part in line.split("|")] for line in lines if line.strip()]
    for page, needs, _ in parts:
        missing = [name for name in needs.split() if name not in column]
        if missing:
            raise SphinxError(f"The map has {page} build on {missing[0]}, which is not above it.")
        column[Path(page).name] = 1 + max((column[name] for name in needs.split()), default=-1)
    of_column = {at: [name for name in column if column[name] == at] for at in column.values()}
    most = max(map(len, of_column.values()))
    found = []
    for page, needs, about in parts:
        name = Path(page).name
        beside = of_column[column[name]]
        row = (beside.index(name) + 0.5) * most / len(beside)  # the rows of a column share its height
        found.append(Station(page, about, tuple(needs.split()), column[name], row))
    return found


def draw_path(app: Sphinx, doctree: nodes.document, page: str) -> None:
    """Put the map where its directive stands."""
    for node in list(doctree.findall(path)):
        html = map_of(app, page, stations(node["lines"])) if app.builder.format == "html" else ""
        node.replace_self(nodes.raw("", html, format="html"))


def map_of(app: Sphinx, page: str, found: list[Station]) -> str:
    """The map as HTML: cards on a grid, and lines from each chapter to those that build on it."""
    columns = 1 + max(station.column for station in found)
    rows = max(sum(other.column == station.column for other in found) for station in found)
    lines = "".join(_line(one, other, columns, rows) for other in found for one in found
                    if Path(one.page).name in other.needs)
    cards = "".join(_card(app, page, station, columns, rows) for station in found)
    return (f'<nav class="book-path" aria-label="The chapters, and what they build on" '
            f'style="--columns:{columns};--rows:{rows}">'
            f'<svg viewBox="0 0 100 100" preserveAspectRatio="none" aria-hidden="true">{lines}</svg>'
            f"<ol>{cards}</ol></nav>")


def _line(start: Station, end: Station, columns: int, rows: int) -> str:
    """From the middle of one card to that of another, behind both; in per cent of the map."""
    (x, y), (to_x, to_y) = (((s.column + 0.5) * 100 / columns, s.row * 100 / rows) for s in (start, end))
    half = (x + to_x) / 2
    return f'<path d="M{x:.1f} {y:.1f}C{half:.1f} {y:.1f} {half:.1f} {to_y:.1f} {to_x:.1f} {to_y:.1f}"/>'


def _card(app: Sphinx, page: str, station: Station, columns: int, rows: int) -> str:
    name = Path(station.page).name
    number, title = app.env.titles[station.page].astext().split(". ", 1)
    to = app.builder.get_relative_uri
    left, top = station.column * 100 / columns, station.row * 100 / rows
    return (f'<li style="left:{left:.2f}%;top:{top:.2f}%"><b>{number}</b>'
            f'<a href="{to(page, station.page)}">{escape(title)}</a> <span>{escape(station.about)}</span>'
            f'<a class="lab" href="{to(page, f"labs/{name}")}" aria-label="Lab {number}">Lab</a></li>')


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the directives with Sphinx."""
    app.add_node(path)
    app.add_directive("widget", Widget)
    app.add_directive("path", BookPath)
    app.connect("doctree-resolved", draw_path)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
