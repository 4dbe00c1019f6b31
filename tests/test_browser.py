"""The browser that tests share: what it keeps of a page that goes wrong, and that a reused page starts clean."""
from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.browser import Browser

ASKS = """<!doctype html><html lang="en"><title>t</title><body><p>x</p><img src="gone.png">
<img src="http://192.0.2.1/address.png"><img src="https://example.com/name.png"><script>
console.error("said"); new WebSocket("ws://example.com/socket"); setTimeout(() => { throw new Error("thrown") })
</script>"""
STATE = """() => [innerWidth, matchMedia('(prefers-color-scheme: dark)').matches,
  matchMedia('(prefers-reduced-motion: reduce)').matches, matchMedia('print').matches, 'left' in window,
  document.querySelector('p').matches(':hover')]"""


@pytest.fixture
def wrong(tmp_path: Path) -> str:
    """The address of a page on which everything goes wrong that can."""
    page = tmp_path / "wrong.html"
    page.write_text(ASKS, "utf-8")
    return page.as_uri()


def test_errors_are_collected_and_no_request_leaves_the_machine(browser: Browser, wrong: str) -> None:
    page, log = browser.open(wrong)
    page.wait_for_function("[...document.images].every(image => image.complete)")
    assert sorted(log.outside) == ["http://192.0.2.1/address.png", "https://example.com/name.png",
                                   "ws://example.com/socket"]
    assert any("gone.png" in text for text in log.failed)
    assert all(f"{name}.png (net::ERR_NAME_NOT_RESOLVED)" in str(log) for name in ("address", "name"))
    assert "said" in log.errors and "uncaught: thrown" in log.errors
    with pytest.raises(AssertionError, match="outside request"):
        log.assert_clean()


def test_a_reused_page_starts_clean(browser: Browser, wrong: str) -> None:
    page, _ = browser.open(wrong, width=500, color_scheme="dark", reduced_motion="reduce")
    other, _ = browser.open(wrong)
    assert other != page and page.evaluate(STATE) == [500, True, True, False, False, False]
    page.evaluate("window.left = 1")
    page.locator("p").hover()
    page.mouse.down()
    page.emulate_media(media="print")
    browser.take_back()
    for _ in range(2):
        again, log = browser.open("about:blank")
        again.set_content("<p>x</p>")
        assert again in (page, other) and again.evaluate(STATE) == [1200, False, False, False, False, False]
        log.assert_clean()


@pytest.mark.slow
def test_other_event_loops_run_only_while_no_test_uses_the_browser(chromium: Browser, wrong: str) -> None:
    """As jupyter_client's do, in a notebook's cells between two browser tests."""
    assert asyncio.run(asyncio.sleep(0, "ran")) == "ran"
    with chromium.awake():
        assert chromium.open(wrong)[0].inner_text("p") == "x"
        chromium.take_back()
    assert asyncio.run(asyncio.sleep(0, "ran again")) == "ran again"
