"""The built website: clean, complete, and the same with no network, on a phone, in the dark and over file://."""
from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest

from book.authoring.sphinx_ext import point_launch_buttons, to_mathml
from book.widgets.assets import ALL, PARTS
from tests.browser import Browser
from tests.website import Site

SCREENS = {"desktop": dict(width=1280), "phone": dict(width=390, height=844, has_touch=True),
           "dark": dict(width=1280, color_scheme="dark")}
OVERFLOW = """() => [...document.querySelectorAll('body *')].filter(e => {
  const box = e.getBoundingClientRect();
  if (!box.width || box.right <= innerWidth + 1) return false;
  for (let p = e; p && p !== document.body; p = p.parentElement) {
    const style = getComputedStyle(p);
    if (style.position === 'fixed' || (p !== e && style.overflowX !== 'visible')) return false;
  }
  return true;
}).map(e => e.tagName + '.' + e.className)"""


def settle(page: Any) -> None:
    """Wait until fonts are in and the page's scripts had a turn after loading."""
    page.evaluate("document.fonts.ready.then(() => new Promise(done => setTimeout(done, 50)))")


def test_builds_without_a_warning(site: Site) -> None:
    assert site.status == 0 and "WARNING" not in site.said, site.said


def test_has_every_page_of_the_contents(site: Site) -> None:
    wanted = {"index.html", "chapters/03_ring_all_reduce.html", "labs/03_ring_all_reduce.html"}
    assert wanted <= set(site.pages()), site.said


def test_a_page_loads_what_its_widgets_need(site: Site) -> None:
    """In order, and nothing of widgets that are not on it."""
    for name in site.pages():
        text = (site.folder / name).read_text("utf-8")
        widgets = re.findall(r"<div data-lockstep-(\w+)=", text)
        wanted = [part for part in ALL if any(part in PARTS[widget] for widget in widgets)]
        for found in (r'<script defer="defer" src="[^"]*/(\w+)\.js\?', r'<link [^>]*href="[^"]*/(\w+)\.css\?'):
            assert [part for part in re.findall(found, text) if part in ALL] == wanted, name


def test_loads_nothing_from_elsewhere(site: Site) -> None:
    """Links may lead anywhere; scripts, styles, fonts and pictures come with the site."""
    loads = re.compile(r"""<(?:script|img|iframe|source|video|audio)\b[^>]*\bsrc=["'](?:https?:)?//|"""
                       r"""<link\b(?=[^>]*rel=["'](?:stylesheet|preload|icon))[^>]*href=["'](?:https?:)?//|@import|"""
                       r"""url\(["']?(?:https?:)?//""")
    found = {page: loads.findall((site.folder / page).read_text("utf-8")) for page in site.pages()}
    assert not any(found.values()), found


@pytest.mark.parametrize("screen", SCREENS)
def test_every_page_is_clean(site: Site, site_url: str, browser: Browser, screen: str) -> None:
    """No 404, no console error, no request to elsewhere, nothing wider than the screen."""
    for name in site.pages():
        page, log = browser.open(f"{site_url}/{name}", **SCREENS[screen])
        settle(page)
        assert not str(log), f"{name} at {screen}:\n{log}"
        width = page.evaluate("document.documentElement.scrollWidth")
        assert width <= page.viewport_size["width"], f"{name} is {width} px wide at {screen}: {page.evaluate(OVERFLOW)}"
        page.context.close()


def test_opens_from_a_file(site: Site, browser: Browser) -> None:
    for name in site.pages():
        page, log = browser.open((site.folder / name).as_uri())
        settle(page)
        assert not str(log), f"{name} over file://:\n{log}"
        page.context.close()


def test_search_finds_the_chapter_with_no_network(site: Site, browser: Browser) -> None:
    page, log = browser.open((site.folder / "search.html").as_uri() + "?q=gradient")
    page.wait_for_selector("#search-results li a")
    assert "03_ring_all_reduce" in page.inner_html("#search-results")
    log.assert_clean()


def test_follows_the_systems_colours(site_url: str, browser: Browser) -> None:
    themes = {}
    for scheme in ("light", "dark"):
        page, _ = browser.open(f"{site_url}/index.html", color_scheme=scheme)
        themes[scheme] = page.evaluate("getComputedStyle(document.body).backgroundColor")
        page.context.close()
    assert themes["light"] != themes["dark"]


def test_html_outputs_are_not_painted_over_in_the_dark(site_url: str, browser: Browser) -> None:
    """Put an HTML output on a real page, as a player is one, and ask for its background."""
    page, _ = browser.open(f"{site_url}/chapters/03_ring_all_reduce.html", color_scheme="dark")
    page.evaluate("""document.querySelector('.bd-article').insertAdjacentHTML('beforeend',
        '<div class="cell_output"><div id="probe" class="output text_html">x</div></div>')""")
    assert page.evaluate("getComputedStyle(document.getElementById('probe')).backgroundColor") == "rgba(0, 0, 0, 0)"


def test_formulas_are_mathml_and_show(site_url: str, browser: Browser) -> None:
    page, _ = browser.open(f"{site_url}/chapters/03_ring_all_reduce.html")
    assert page.evaluate("document.querySelectorAll('math').length") > 0
    assert page.evaluate("[...document.querySelectorAll('math')].every(m => m.getBoundingClientRect().width > 2)")
    assert "$" not in page.evaluate("[...document.querySelectorAll('.bd-article p')].map(p => p.innerText).join()")


def test_a_fraction_becomes_mathml() -> None:
    assert "<mfrac>" in to_mathml(None, r"\frac{2(p-1)}{p}", "inline")


def test_launch_buttons_lead_to_the_repository_of_the_build(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GITHUB_REPOSITORY", "somebody/fork")
    config = SimpleNamespace(html_theme_options={"launch_buttons": {"binderhub_url": "https://mybinder.org"}})
    point_launch_buttons(None, config)
    assert config.html_theme_options["repository_url"] == "https://github.com/somebody/fork"
    assert config.html_theme_options["launch_buttons"]


def test_no_launch_button_leads_nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GITHUB_REPOSITORY", raising=False)
    config = SimpleNamespace(html_theme_options={"launch_buttons": {"binderhub_url": "https://mybinder.org"}})
    point_launch_buttons(None, config)
    assert not config.html_theme_options["launch_buttons"]
