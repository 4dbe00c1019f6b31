"""L4: the figures that stored chapters show, each with its title, its place, and what the text around it says."""
from __future__ import annotations

import base64
import html
import re
from collections.abc import Iterator
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path

from nbformat import NotebookNode

from book.authoring.notebooks import parse
from book.authoring.sphinx_ext import PLOT_TITLE

WIDGET = re.compile(r"<div data-lockstep-(\w+)='[^']*'>(.*)</div>\s*\Z", re.S)
WIDGET_TITLE = re.compile(r"<p><strong>(.*?)</strong>(?: \(((?:[^()]|\([^()]*\))*)\))?", re.S)
HEADING = re.compile(r"^#{2,} +(.+)$", re.M)
TITLE_LINE = re.compile(  # of a plot: its y, and the words; no other text of a plot has this size
    r'<text style="font-size: 11px[^>]*?(?:y="|translate\(\S+ )([\d.]+)[^>]*>([^<]*)</text>')
LEDGER = "ledger"  # the widget whose table closes a chapter


@dataclass(frozen=True)
class Figure:
    """A figure of a chapter.

    A plot has a `picture` (PNG), and mostly the same as SVG in `html`. A widget has its name, its HTML and its `words`,
    lines for a reader without scripts. `before` and `after` are the Markdown cells around it, "" where there is none.
    """

    page: str
    heading: str
    title: str
    source: str
    picture: bytes | None
    widget: str
    html: str
    words: list[str]
    before: str
    after: str

    @property
    def anchor(self) -> str:
        """The id of its section on the website, "" before the first."""
        return slug(self.heading)

    @property
    def untitled(self) -> str:
        """A plot's SVG without its title, and without the room for it."""
        lines = list(TITLE_LINE.finditer(self.html))
        if not lines:
            return self.html
        top = float(lines[-1][1]) + 4  # letters reach below their line
        cut = re.sub(r' width="\d+" height="\d+" viewBox="0 0 (\S+) (\S+)"', lambda box: (
            f' viewBox="0 {top:.2f} {box[1]} {float(box[2]) - top:.2f}"'), self.html, count=1)
        return TITLE_LINE.sub("", cut)


def figures(path: Path) -> list[Figure]:
    """All figures of a stored notebook, in their order."""
    notebook, heading, found = parse(path.read_text("utf-8"), path), "", []
    for place, cell in enumerate(notebook.cells):
        if cell.cell_type == "markdown":
            heading = ([heading] + HEADING.findall(cell.source))[-1]
            continue
        around = [_text(notebook.cells, place - 1), _text(notebook.cells, place + 1)]
        for output in cell.get("outputs", []):
            found += [_figure(path.stem, heading, cell, data, around) for data in _shown(output)]
    return found


def slug(heading: str) -> str:
    """What the website makes of a heading for links: words in small letters, joined by hyphens."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-")


def table_of(ledger: Figure) -> list[list[str]]:
    """The rows of a ledger's table, its head first."""
    return [line.split(" | ") for line in ledger.words if " | " in line]


def _shown(output: NotebookNode) -> Iterator[NotebookNode]:
    data = output.get("data", {})
    if "image/png" in data or WIDGET.match(data.get("text/html", "")):
        yield data


def _text(cells: list[NotebookNode], place: int) -> str:
    """The Markdown cell at a place, "" if there is none."""
    beside = cells[place] if 0 <= place < len(cells) else None
    return str(beside.source) if beside is not None and beside.cell_type == "markdown" else ""


def _figure(page: str, heading: str, cell: NotebookNode, data: NotebookNode, around: list[str]) -> Figure:
    widget = WIDGET.match(data.get("text/html", ""))
    if widget is None:
        written = [last or named for last, named in PLOT_TITLE.findall(cell.source)][-1:]
        picture, drawn = base64.b64decode(data["image/png"]), data.get("image/svg+xml", "")
        lines = [line[2] if line[2].endswith("-") else f"{line[2]} " for line in TITLE_LINE.finditer(drawn)]
        shown = html.unescape("".join(lines)).strip()
        return Figure(page, heading, shown or "".join(written) or heading, "", picture, "", drawn, [], *around)
    named = WIDGET_TITLE.search(widget[2])
    title, source = (html.unescape(text or "") for text in (named.groups() if named else (heading, "")))
    return Figure(page, heading, title, source, None, widget[1], widget[0], WidgetText(widget[2]).lines[1:], *around)


class WidgetText(HTMLParser):
    """The words of a widget as `lines`: a paragraph, an item of a list or a row of a table each."""

    def __init__(self, words: str) -> None:
        super().__init__()
        self.lines: list[str] = []
        self._row: list[str] = []
        self.feed(words)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Begin a line, or a cell of one."""
        if tag in ("p", "li"):
            self.lines.append("")
        elif tag == "tr":
            self._row = []
        elif tag in ("td", "th"):
            self._row.append("")

    def handle_data(self, data: str) -> None:
        """Add to the cell or line that is open."""
        if self._row:
            self._row[-1] += data
        elif self.lines:
            self.lines[-1] += data

    def handle_endtag(self, tag: str) -> None:
        """End a row."""
        if tag == "tr":
            self.lines.append(" | ".join(self._row))
            self._row = []
