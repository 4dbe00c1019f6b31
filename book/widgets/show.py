"""L3: a page as it is shown: live in a notebook whose packages allow it, or just the page."""
from __future__ import annotations

from typing import Any

from book.widgets.page import Page


def show(page: Page) -> Any:
    """The live widget, or just the page if the packages that a live notebook needs are not installed."""
    try:
        from book.widgets.live import live_class
    except ImportError:
        return page
    return live_class(page.widget)(page)
