"""This machine's headless Chromium, for pages that are served or stored here."""
from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from benchmarks.report import Unavailable
from book.authoring.photos import ARGUMENTS, find_chromium

VIEWPORT = {"width": 1280, "height": 900}


def find_browser() -> str:
    """The path of a Chromium, LOCKSTEP_BROWSER first; raises `Unavailable` if there is none."""
    found = find_chromium()
    if not found:
        raise Unavailable("no Chromium found: install chromium, or name one in LOCKSTEP_BROWSER")
    return found


class Files(SimpleHTTPRequestHandler):
    """Files over HTTP, without a line for each."""

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing."""


@contextlib.contextmanager
def served(folder: Path) -> Iterator[str]:
    """Serve `folder` at a free port while the block runs; yields the address without a final slash."""
    with ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Files, directory=str(folder))) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()


@contextlib.contextmanager
def running_browser() -> Iterator[Any]:
    """Playwright's browser for the duration of the block; raises `Unavailable` if it or Chromium is missing."""
    path = find_browser()
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        raise Unavailable("playwright is not installed: pip install -r requirements.txt") from None
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, headless=True, args=ARGUMENTS)
        try:
            yield browser
        finally:
            browser.close()


@contextlib.contextmanager
def fresh_page(browser: Any) -> Iterator[Any]:
    """A page in a context of its own, with an empty cache."""
    context = browser.new_context(viewport=VIEWPORT)
    try:
        yield context.new_page()
    finally:
        context.close()
