"""The shape of a chapter on the built website: where its figures stand, how it and its lab link."""
from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import nbformat
import pytest

from book import plot
from book.authoring.lint import opening
from book.authoring.notebooks import tags
from tests.browser import SETTLED, Browser
from tests.website import ROOT, Site

CHAPTERS = sorted(path.stem for path in (ROOT / "chapters").glob("[01]*.ipynb"))
DESK, PHONE = dict(width=1280, height=800), dict(width=390, height=844, has_touch=True)
MOST_SCREENS_WITHOUT_FIGURE = 6
OPENING_PX, OPENING_END_PX, OPENING_END_PHONE_SCREENS = 560, 800, 1.3

# Chapters that do not keep a rule yet. A chapter that keeps it has to be taken out.
NOT_YET = {
    "stretch": set(),
    "opening": set(),
    "phone": set(),
    "lab": set(),
    "folded": set(),
}

# Top and bottom of each outermost figure: a widget, a picture or an SVG, but not those of buttons.
SHAPE = """() => {
  const article = document.querySelector('.bd-article'), figure = '.lockstep-player, img, svg';
  const within = e => e.parentElement.closest(figure + ', button');
  const edges = e => { const box = e.getBoundingClientRect(); return [box.top + scrollY, box.bottom + scrollY] };
  const figures = [...article.querySelectorAll(figure)].filter(e => !within(e));
  return { figures: figures.map(edges).sort(([a], [b]) => a - b), text: edges(article)[1],
           page: document.documentElement.scrollHeight };
}"""
# The link below the title: where it leads, as it is written, if it is the first thing there.
LAB_LINK = """() => {
  const link = document.querySelector('.bd-article h1 + p > a:first-child');
  return link && link.innerText === 'Do the lab' ? link.getAttribute('href') : null;
}"""
# The first cell with a picture or widget below it: whether it is folded, and whether its code is to be seen.
FOLD = """() => {
  const cell = document.querySelector('.bd-article .cell:has(.cell_output :is(.lockstep-player, img, svg))');
  if (!cell) return { folded: false, line: 0, code: true };
  const fold = cell.querySelector('details.hide');
  return { folded: !!fold && !fold.open, line: fold?.querySelector('summary').getBoundingClientRect().height,
           code: cell.querySelector('.cell_input pre').checkVisibility() };
}"""


# By how much the page shrinks its plots: 1 where it shows them as large as they are.
SHRUNK = """() => Math.min(1, ...[...document.querySelectorAll('.bd-article .cell_output img')]
    .map(plot => plot.clientWidth / plot.naturalWidth))"""


@dataclass(frozen=True)
class Shape:
    """Where a page's figures begin and end, where its text ends, and its height, all in pixels from its top."""

    figures: list[tuple[float, float]]
    text: float
    page: float

    def longest_stretch(self) -> float:
        """The most pixels without a figure, from the page's top to the end of its text."""
        ends = [0.0, *(bottom for _, bottom in self.figures)]
        starts = [*(top for top, _ in self.figures), self.text]
        return max(start - end for end, start in zip(ends, starts))


@dataclass(frozen=True)
class Seen:
    """What a reader sees of a chapter: on a desktop and on a phone, by how much its plots are shrunk there, its first
    link, and its first cell with a figure, before a click on it and after."""

    desk: Shape
    phone: Shape
    shrunk: float
    lab: str | None
    folded: dict[str, Any]
    opened: dict[str, Any]


def rule(name: str) -> pytest.MarkDecorator:
    """All chapters, those that do not keep the rule yet as strict xfails."""
    xfail = pytest.mark.xfail(reason=f"does not keep the rule yet: {name}", strict=True, raises=AssertionError)
    return pytest.mark.parametrize("chapter", [pytest.param(chapter, marks=[xfail] * (chapter[:2] in NOT_YET[name]))
                                               for chapter in CHAPTERS])


def address(site: Site, page: str) -> str:
    """A page's address, over file://."""
    return (site.folder / f"{page}.html").as_uri()


@pytest.fixture(scope="module")
def seen(site: Site, chromium: Browser) -> Iterator[dict[str, Seen]]:
    """What there is to see of each chapter: its page is loaded once for all tests."""
    with chromium.awake():
        desk, _ = chromium.open("about:blank", **DESK)
        phone, _ = chromium.open("about:blank", **PHONE)
        found = {}
        for chapter in CHAPTERS:
            for page in (desk, phone):
                page.goto(address(site, f"chapters/{chapter}"), wait_until="load")
                page.evaluate(SETTLED)
            shapes = [Shape(**page.evaluate(SHAPE)) for page in (desk, phone)]
            shrunk, lab, folded = phone.evaluate(SHRUNK), desk.evaluate(LAB_LINK), desk.evaluate(FOLD)
            desk.evaluate("document.querySelector('.bd-article details.hide summary')?.click()")
            found[chapter] = Seen(*shapes, shrunk, lab, folded, desk.evaluate(FOLD))
        chromium.take_back()
    yield found


def test_no_chapter_is_missing_or_unknown() -> None:
    assert [int(chapter[:2]) for chapter in CHAPTERS] == [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15]
    assert set().union(*NOT_YET.values()) <= {chapter[:2] for chapter in CHAPTERS}


@pytest.mark.slow
@rule("stretch")
def test_no_long_stretch_is_without_a_figure(seen: dict[str, Seen], chapter: str) -> None:
    assert seen[chapter].desk.longest_stretch() / DESK["height"] <= MOST_SCREENS_WITHOUT_FIGURE


@pytest.mark.slow
@rule("opening")
def test_the_opening_figure_is_whole_on_the_first_screen(seen: dict[str, Seen], chapter: str) -> None:
    top, bottom = seen[chapter].desk.figures[0]
    assert bottom - top <= OPENING_PX and bottom <= OPENING_END_PX


@pytest.mark.slow
@rule("phone")
def test_the_opening_figure_is_near_on_a_phone(seen: dict[str, Seen], chapter: str) -> None:
    assert seen[chapter].phone.figures[0][1] / PHONE["height"] <= OPENING_END_PHONE_SCREENS


@pytest.mark.slow
@pytest.mark.parametrize("chapter", CHAPTERS)
def test_the_text_of_plots_is_twelve_pixels_high_on_a_phone(seen: dict[str, Seen], chapter: str) -> None:
    assert plot.TEXT / 72 * plot.DPI * seen[chapter].shrunk >= 12


@pytest.mark.slow
@rule("lab")
def test_a_chapter_and_its_lab_link_to_each_other(site: Site, seen: dict[str, Seen], chapter: str) -> None:
    assert seen[chapter].lab == f"../labs/{chapter}.html"
    lab = (site.folder / f"labs/{chapter}.html").read_text("utf-8")
    article = lab.partition('class="bd-article"')[2].partition("</article>")[0]
    assert f'href="../chapters/{chapter}.html"' in article


@pytest.mark.slow
@rule("folded")
def test_the_code_of_the_opening_figure_is_folded(seen: dict[str, Seen], chapter: str) -> None:
    """Into one line, which opens on a click; in the notebook it is the one cell that may be."""
    cell = opening(nbformat.read(ROOT / "chapters" / f"{chapter}.ipynb", as_version=4))
    assert cell is not None and "hide-input" in tags(cell)
    before, after = seen[chapter].folded, seen[chapter].opened
    assert before["folded"] and not before["code"] and before["line"] < 50
    assert not after["folded"] and after["code"]
