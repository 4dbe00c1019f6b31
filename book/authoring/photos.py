"""L4: photographs of figures, widgets as their pages begin, taken by a Chromium on this machine."""
from __future__ import annotations

import base64
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import product
from typing import TYPE_CHECKING, TypeAlias, TypeVar

if TYPE_CHECKING:  # whoever imports this module for `find_chromium` alone need not load Sphinx
    from playwright.sync_api import Page

    from book.authoring.figures import Figure

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
ARGUMENTS = ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
             "--disable-background-networking", "--disable-component-update", "--disable-sync"]
PLAYER = ".lockstep-player"
WIDTHS_PX = (760, 980, 1280)  # of the page: a widget lays itself out anew in each
PLOT_PX = 760
# A picture plays nothing, its slide has the title, and before the first step all counts are 0: the rest is larger.
STILL = """.lk-head:not(.lk-run) b, .lk-turns, .lk-play, .lk-bar button, .lk-bar summary, .lk-fault button, .lk-told,
           .lockstep-player details, [data-step="0"]:has(.lk-card) .lk-foot { display: none !important }
           .lockstep-player { border: 0 !important; margin: 0 !important; padding: 2px 10px !important }
           .lockstep-player :is(.lk-caption, .lk-detail, .lk-dial, .lk-quiz) { min-height: 0 !important }
           .beside { align-items: center; column-gap: 28px; display: grid; max-width: none !important;
                     grid-template-columns: var(--drawing) var(--words);
                     width: calc(var(--drawing) + var(--words) + 48px) }
           .beside > :last-child .lk-foot { grid-template-columns: repeat(2, 1fr) !important }"""
# A slide is wider than a page is: where what is around a widget's drawing stands beside it, all letters are larger.
DRAWINGS_PX, WORDS_PX = (560, 640), (210, 280, 350)
PART = """() => {
  const player = document.querySelector(".lockstep-player"), drawing = player.querySelector(":scope > .lk-field");
  if (!drawing) return false;
  const sides = [0, 1].map(() => document.createElement("div"));
  sides[1].append(...player.children);
  sides[0].append(drawing);
  player.append(...sides);
  player.classList.add("beside");
  return true;
}"""
ARRANGE = """([drawing, words, below]) => {
  const player = document.querySelector(".beside"), counts = player.querySelector(".lk-foot");
  player.style = `--drawing: ${drawing}px; --words: ${words}px`;
  if (counts) player.children[below ? 0 : 1].append(counts);
}"""
DRAWN = "() => new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))"

Camera: TypeAlias = "Callable[[Figure, float], bytes]"
T = TypeVar("T")


def find_chromium() -> str | None:
    """The path of a Chromium, the one in LOCKSTEP_BROWSER first; None if there is none."""
    named = os.environ.get("LOCKSTEP_BROWSER", "")
    return next(filter(None, map(shutil.which, [named, *NAMES] if named else NAMES)), None)


def page_of(figure: Figure) -> str:
    """The HTML of a page that shows a figure alone: a widget, or a plot's SVG as a file, since its links are XML's."""
    from book.widgets.registry import standalone

    if figure.widget:
        return standalone(figure.widget, figure.title, figure.html)
    file = base64.b64encode(figure.untitled.encode()).decode()
    return f'<img class="{PLAYER[1:]}" width="{PLOT_PX}" src="data:image/svg+xml;base64,{file}">'


def load(page: Page, figure: Figure) -> None:
    """Let the page show the figure alone, without what is of no use on a slide."""
    page.set_content(page_of(figure), wait_until="load")
    page.wait_for_selector(PLAYER)
    page.add_style_tag(content=STILL)


def widen(page: Page, width: int) -> None:
    """Give the page's window this width."""
    page.set_viewport_size({"width": width, "height": 900})


def arrange(page: Page, layout: tuple[int, int, bool]) -> None:
    """Set the widths of a drawing and of the words beside it, and whether its counts stand below the drawing."""
    page.evaluate(ARRANGE, layout)


def side(page: Page, shape: float, change: Callable[[Page, T], None], layout: T) -> float:
    """How wide a frame of this shape, width over height, has to be in pixels to hold what the layout makes."""
    change(page, layout)
    page.evaluate(DRAWN)
    box = page.locator(PLAYER).first.bounding_box()
    assert box, "a figure can be seen"
    return max(box["width"], box["height"] * shape)


def photograph(page: Page, figure: Figure, shape: float) -> bytes:
    """A PNG of the figure, a widget in that layout in which it is largest in a frame of this shape."""
    load(page, figure)
    stacked = min((side(page, shape, widen, width), width) for width in WIDTHS_PX)
    parted = []
    if figure.widget and page.evaluate(PART):
        layouts = product(DRAWINGS_PX, WORDS_PX, (False, True))
        parted = [(side(page, shape, arrange, layout), layout) for layout in layouts]
    if parted and min(parted)[0] < stacked[0]:
        arrange(page, min(parted)[1])
    else:
        load(page, figure)
        widen(page, stacked[1])
    page.evaluate(DRAWN)
    return bytes(page.locator(PLAYER).first.screenshot())


@contextmanager
def camera() -> Iterator[Camera | None]:
    """A function that takes a PNG of a figure; a widget is laid out to be largest in a frame of width over height.

    None where Playwright or Chromium is missing.
    """
    path = find_chromium()
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        path = None
    if path is None:
        yield None
        return
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, headless=True, args=ARGUMENTS)
        page = browser.new_context(device_scale_factor=2, color_scheme="light", reduced_motion="reduce").new_page()
        try:
            yield partial(photograph, page)
        finally:
            browser.close()
