"""L4: photographs of figures, widgets as their pages begin, taken by a Chromium on this machine."""
from __future__ import annotations

import base64
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:  # whoever imports this module for `find_chromium` alone need not load Sphinx
    from book.authoring.figures import Figure

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
ARGUMENTS = ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
             "--disable-background-networking", "--disable-component-update", "--disable-sync"]
PLAYER = ".lockstep-player"
WIDTHS_PX = (760, 980, 1280)  # of the page: a widget lays itself out anew in each
PLOT_PX = 760
# A picture plays nothing, its slide has the title, and before the first step all counts are 0: the rest is larger.
STILL = """.lk-head b, .lk-turns, .lk-play, .lk-bar button, .lk-bar summary, .lockstep-player > details,
           [data-step="0"]:has(.lk-card) .lk-foot { display: none !important }"""

Camera: TypeAlias = "Callable[[Figure, float], bytes]"


def find_chromium() -> str | None:
    """The path of a Chromium, the one in LOCKSTEP_BROWSER first; None if there is none."""
    named = os.environ.get("LOCKSTEP_BROWSER", "")
    return next(filter(None, map(shutil.which, [named, *NAMES] if named else NAMES)), None)


def page_of(figure: Figure) -> str:
    """The HTML of a page that shows a figure alone: a widget, or a plot's SVG as a file, since its links are XML's."""
    from book.widgets.registry import standalone

    if figure.widget:
        return standalone(figure.widget, figure.title, figure.html)
    file = base64.b64encode(figure.html.encode()).decode()
    return f'<img class="{PLAYER[1:]}" width="{PLOT_PX}" src="data:image/svg+xml;base64,{file}">'


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

        def photograph(figure: Figure, shape: float) -> bytes:
            page.set_content(page_of(figure), wait_until="load")
            page.wait_for_selector(PLAYER)
            page.add_style_tag(content=STILL)
            sizes = []
            for width in WIDTHS_PX:
                page.set_viewport_size({"width": width, "height": 900})
                box = page.locator(PLAYER).first.bounding_box()
                sizes.append((max(box["width"], box["height"] * shape), width))
            page.set_viewport_size({"width": min(sizes)[1], "height": 900})
            return bytes(page.locator(PLAYER).first.screenshot())

        try:
            yield photograph
        finally:
            browser.close()
