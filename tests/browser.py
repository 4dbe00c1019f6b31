"""A real Chromium for tests: the network is blocked except for this machine, and everything that goes wrong is kept."""
from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlparse

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
ARGUMENTS = ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
             "--disable-background-networking", "--disable-component-update", "--disable-sync",
             "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1"]
THIS_MACHINE = {"127.0.0.1", "localhost", "::1"}


def find_browser() -> str:
    """Return the path of a Chromium (LOCKSTEP_BROWSER first); skip the test, or fail it where one is required."""
    named = os.environ.get("LOCKSTEP_BROWSER", "")
    found = next(filter(None, map(shutil.which, [named, *NAMES] if named else NAMES)), None)
    if found:
        return found
    reason = "no Chromium found: install chromium, or name one in LOCKSTEP_BROWSER"
    if os.environ.get("LOCKSTEP_REQUIRE_BROWSER") == "1":
        pytest.fail(f"{reason} (LOCKSTEP_REQUIRE_BROWSER=1)", pytrace=False)
    pytest.skip(reason)


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
    """A running Chromium that opens pages in contexts of their own; `playwright` is the handle below it."""

    def __init__(self, playwright: Any) -> None:
        """Start the browser that `find_browser` finds."""
        self.chromium = playwright.chromium.launch(executable_path=find_browser(), headless=True, args=ARGUMENTS)

    def open(self, url: str, *, width: int = 1200, height: int = 900, **context: Any) -> tuple[Any, Log]:
        """Open `url` in a fresh context and wait for it to load; returns the page and its log.

        `context` goes to Playwright's `new_context`: color_scheme="dark", reduced_motion="reduce", has_touch=True.
        """
        page = self.chromium.new_context(viewport={"width": width, "height": height}, **context).new_page()
        log = watch(page)
        page.goto(url, wait_until="load")
        return page, log

    def close(self) -> None:
        """End the browser and all its pages."""
        self.chromium.close()


def watch(page: Any) -> Log:
    """Block what leaves this machine on `page` and keep what goes wrong on it."""
    log = Log()

    def route(request_route: Any) -> None:
        url = urlparse(request_route.request.url)
        if url.scheme in {"http", "https", "ws", "wss"} and url.hostname not in THIS_MACHINE:
            log.outside.append(request_route.request.url)
            request_route.abort()
        else:
            request_route.continue_()

    page.route("**/*", route)
    page.on("console", lambda message: log.errors.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: log.errors.append(f"uncaught: {error}"))
    page.on("requestfailed", lambda request: log.failed.append(f"{request.url} ({request.failure})"))
    page.on("response", lambda r: log.failed.append(f"{r.url} ({r.status})") if r.status >= 400 else None)
    return log


@contextlib.contextmanager
def running_browser() -> Iterator[Browser]:
    """A browser for the length of the block."""
    find_browser()
    from playwright.sync_api import sync_playwright  # after find_browser: where it skips, Playwright may be missing too

    with sync_playwright() as playwright:
        browser = Browser(playwright)
        try:
            yield browser
        finally:
            browser.close()
