"""A real Chromium for tests: the network is blocked except for this machine, and everything that goes wrong is kept."""
from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlparse

import pytest

from benchmarks import chromium
from benchmarks.report import Unavailable

ARGUMENTS = ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
             "--disable-background-networking", "--disable-component-update", "--disable-sync",
             "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1"]
# How wide the page is, once its fonts are in and its scripts had their turn: two frames and an idle moment.
SETTLED = """async () => {
  await document.fonts.ready;
  for (let k = 0; k < 2; k++) await new Promise(requestAnimationFrame);
  await new Promise(done => requestIdleCallback(done));
  return document.documentElement.scrollWidth;
}"""
THIS_MACHINE = {"127.0.0.1", "localhost", "::1"}


def find_browser() -> str:
    """Return the path of a Chromium (LOCKSTEP_BROWSER first); skip the test, or fail it where one is required."""
    try:
        return chromium.find_browser()
    except Unavailable as missing:
        if os.environ.get("LOCKSTEP_REQUIRE_BROWSER") == "1":
            pytest.fail(f"{missing} (LOCKSTEP_REQUIRE_BROWSER=1)", pytrace=False)
        pytest.skip(str(missing))


@dataclass
class Log:
    """What went wrong on a page: console errors, uncaught exceptions, failed requests, requests to elsewhere."""

    errors: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    outside: list[str] = field(default_factory=list)

    def assert_clean(self) -> None:
        """Fail with everything that was kept, if anything was."""
        assert not (self.errors or self.failed or self.outside), str(self)

    def __str__(self) -> str:
        """One line per finding."""
        kinds = (("console", self.errors), ("failed request", self.failed), ("outside request", self.outside))
        return "\n".join(f"{kind}: {text}" for kind, texts in kinds for text in texts)


class Browser:
    """A running Chromium whose pages are used again, which costs a sixth of a new one."""

    def __init__(self, playwright: Any) -> None:
        """Start the browser that `find_browser` finds."""
        self.chromium = playwright.chromium.launch(executable_path=find_browser(), headless=True, args=ARGUMENTS)
        self.loop = asyncio.get_running_loop()
        self._free: dict[Any, list[Tab]] = {}
        self._taken: list[tuple[Any, Tab]] = []

    def open(self, url: str, *, width: int = 1200, height: int = 900, color_scheme: str = "light",
             reduced_motion: str = "no-preference", **context: Any) -> tuple[Any, Log]:
        """Open `url` and wait for it to load; returns the page, reserved until `take_back`, and its log.

        `context` goes to Playwright's `new_context`: has_touch=True, java_script_enabled=False.
        """
        kind = tuple(sorted(context.items()))
        free = self._free.setdefault(kind, [])
        tab = free.pop() if free else Tab(self.chromium.new_context(**context).new_page())
        self._taken.append((kind, tab))
        tab.page.set_viewport_size({"width": width, "height": height})
        tab.page.emulate_media(media="null", color_scheme=color_scheme, reduced_motion=reduced_motion)
        tab.page.goto(url, wait_until="load")
        return tab.page, tab.log

    def take_back(self) -> None:
        """End what runs on the pages that were opened, so that they can be used again."""
        for kind, tab in self._taken:
            if tab.emptied():
                self._free[kind].append(tab)
        self._taken.clear()

    @contextlib.contextmanager
    def awake(self) -> Iterator[Browser]:
        """A block in which pages can be asked for something.

        Playwright's event loop is suspended in a greenlet, and counts as running in this thread for as long as the
        browser lives. Python runs one loop in a thread, and jupyter_client needs one of its own to speak to a kernel.
        So Playwright's counts as running only in here.
        """
        asyncio._set_running_loop(self.loop)
        try:
            yield self
        finally:
            asyncio._set_running_loop(None)


class Tab:
    """A page and the log of what it shows now."""

    def __init__(self, page: Any) -> None:
        """Keep what goes wrong on `page` from now on."""
        self.page, self.log = page, Log()
        page.on("request", lambda request: self._asked(request.url))
        page.on("websocket", lambda socket: self._asked(socket.url))
        page.on("console", self._said)
        page.on("pageerror", lambda error: self.log.errors.append(f"uncaught: {error}"))
        page.on("requestfailed", lambda request: self.log.failed.append(f"{request.url} ({request.failure})"))
        page.on("response", lambda r: self.log.failed.append(f"{r.url} ({r.status})") if r.status >= 400 else None)

    def _asked(self, url: str) -> None:
        parts = urlparse(url)
        if parts.scheme in {"http", "https", "ws", "wss"} and parts.hostname not in THIS_MACHINE:
            self.log.outside.append(url)

    def _said(self, message: Any) -> None:
        if message.type == "error" and not message.location["url"].endswith("/favicon.ico"):  # browsers always ask
            self.log.errors.append(message.text)

    def emptied(self) -> bool:
        """Show nothing, with the pointer in a corner, and begin a new log; False if the page can't be used again."""
        from playwright.sync_api import Error

        try:
            self.page.goto("about:blank")
            self.page.mouse.up()
            self.page.mouse.move(0, 0)
        except Error:
            return False
        self.log = Log()
        return True


@contextlib.contextmanager
def running_browser() -> Iterator[Browser]:
    """A browser for the length of the block; see `Browser.awake`."""
    find_browser()
    from playwright.sync_api import sync_playwright  # after find_browser: where it skips, Playwright may be missing too

    with sync_playwright() as playwright:
        browser = Browser(playwright)
        asyncio._set_running_loop(None)
        try:
            yield browser
        finally:
            asyncio._set_running_loop(browser.loop)
            browser.chromium.close()


@contextlib.contextmanager
def page_with(browser: Browser, scripts: str) -> Iterator[Any]:
    """An empty page that has run these scripts; at the end, asserts that nothing went wrong there."""
    page, log = browser.open("about:blank")
    page.add_script_tag(content=scripts)
    yield page
    log.assert_clean()
