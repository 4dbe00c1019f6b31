"""Fixtures that several test modules share: the built website, its address, a browser, widgets in it."""
from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from benchmarks.chromium import served
from tests.browser import Browser, running_browser
from tests.once import folder, once
from tests.players import PLAYER, write_page
from tests.website import Site, build_site

# No test asserts a time, but by default hypothesis fails an example that takes over 200 ms.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")


@pytest.fixture(scope="session")
def site() -> Site:
    """The website, built once for all tests of a run."""
    return once("site", lambda: build_site(folder() / "site"))


@pytest.fixture(scope="session")
def bare_site() -> Site:
    """The website without solutions, built once for all tests of a run."""
    return once("bare_site", lambda: build_site(folder() / "bare_site", solutions=False))


@pytest.fixture(scope="session")
def site_url(site: Site) -> Iterator[str]:
    """The address of the built website on this machine, without a final slash."""
    with served(site.folder) as url:
        yield url


@pytest.fixture(scope="session")
def chromium() -> Iterator[Browser]:
    """A Chromium for all tests of a process, asleep: see `Browser.awake`."""
    with running_browser() as running:
        yield running


@pytest.fixture
def browser(chromium: Browser) -> Iterator[Browser]:
    """The Chromium, awake as long as this test runs; then it takes back the pages that the test opened."""
    with chromium.awake():
        yield chromium
        chromium.take_back()


@pytest.fixture
def show(tmp_path: Path, browser: Browser) -> Iterator[Callable[..., Any]]:
    """Opens widgets on a page over file://, and at the end of the test asserts that nothing went wrong there."""
    logs = []

    def open_page(*shown: Any, wait: bool = True, **options: Any) -> Any:
        page, log = browser.open(write_page(tmp_path / f"{len(logs)}.html", *shown).as_uri(), **options)
        logs.append(log)
        if wait:
            assert page.evaluate(f"!!document.querySelector('{PLAYER}')"), "the page is loaded, and no widget is on it"
        return page

    yield open_page
    for log in logs:
        log.assert_clean()


@pytest.fixture
def interruptible() -> Iterator[None]:
    """SIGINT raises KeyboardInterrupt while the test runs, here and in the programs that it starts.

    A shell without job control starts what ends in `&` with SIGINT ignored, and every program below inherits that.
    """
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)
