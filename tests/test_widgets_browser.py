"""What every widget does, in a real Chromium, on static pages of its own HTML and assets, with the network blocked."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.players import FRAMES, PLAYER, assert_readable, click, contrasts, press, state, until
from tests.widget_rows import WIDGETS, Widget

each_widget = pytest.mark.parametrize("widget", WIDGETS, ids=str)
both_themes = pytest.mark.parametrize("theme", ["light", "dark"])
COLOURS = """selector => [getComputedStyle(document.querySelector('.lockstep-player')).backgroundColor,
                          getComputedStyle(document.querySelector(selector)).fill]"""
NAME = "(e => e.ariaLabel || e.textContent || e.title)(document.activeElement)"
LEAKS = "addEventListener('keydown', e => { window.leaked = (window.leaked || '') + e.key })"
WATCH = """moving => { window.seen = new Set(); new MutationObserver(() => seen.add(eval(moving)))
             .observe(document.body, {subtree: true, attributes: true, childList: true}) }"""


def shown(show: Callable, widget: Widget, **options: Any) -> Any:
    """A page with a small one, at its start."""
    page = show(widget.make(), **options)
    press(page, *widget.keys, "Home")
    until(page, step=0, steps=widget.steps, playing="false")
    return page


def paint(page: Any, theme: str) -> None:
    page.evaluate("""theme => { document.documentElement.dataset.theme = theme;
                                document.body.style.background = theme === 'dark' ? '#000' : '#fff' }""", theme)


@each_widget
def test_transport(show: Callable, widget: Widget) -> None:
    page = shown(show, widget)
    for name, step in (("One step forward", 1), ("One step forward", 2), ("One step back", 1)):
        click(page, name)
        until(page, step=step, playing="false")
    for speed in ("1×", "2×"):
        page.get_by_role("button", name=speed).click()
    click(page, "Play")
    until(page, playing="true")
    click(page, "Pause")
    until(page, playing="false")
    click(page, "Play")
    until(page, step=widget.steps, playing="false")
    click(page, "Back to the start")
    until(page, step=0)
    assert page.locator(".lk-scrub").get_attribute("aria-valuemax") == str(widget.steps)


@each_widget
def test_keyboard_and_nothing_leaks(show: Callable, widget: Widget) -> None:
    page, last = shown(show, widget), widget.steps
    page.evaluate(LEAKS)
    for key, step in (("End", last), ("ArrowLeft", last - 1), ("Home", 0), ("ArrowRight", 1), ("a", 1), ("Enter", 1)):
        page.keyboard.press(key)
        until(page, step=step, playing="false")
    for playing in ("true", "false"):
        page.keyboard.press(" ")
        until(page, playing=playing)
    assert page.evaluate("window.leaked") is None


@each_widget
def test_every_control_can_be_reached_by_tab(show: Callable, widget: Widget) -> None:
    page, reached = show(widget.make()), []
    for _ in widget.tabs:
        page.keyboard.press("Tab")
        reached.append(page.evaluate(NAME))
    page.keyboard.press("Tab")
    assert tuple(reached) == widget.tabs and not page.evaluate(f"document.activeElement.closest('{PLAYER}')")


@each_widget
def test_reduced_motion_shows_stops_only(show: Callable, widget: Widget) -> None:
    for motion in ("reduce", "no-preference"):
        page = shown(show, widget, reduced_motion=motion)
        page.evaluate(WATCH, widget.moving)
        for speed in ("1×", "2×"):
            page.get_by_role("button", name=speed).click()
        click(page, "Play")
        until(page, step=widget.steps, playing="false")
        num_seen = page.evaluate("seen.size")
        assert num_seen == widget.num_seen if motion == "reduce" else num_seen > widget.num_seen, (motion, num_seen)


@each_widget
@pytest.mark.parametrize("width", [760, 390, 320])
def test_nothing_overlaps_and_nothing_moves(show: Callable, widget: Widget, width: int) -> None:
    """At every few stops of every run all texts can be read, and the controls stay where they are."""
    page = show(*widget.many(), width=width, height=1500, reduced_motion="reduce")
    press(page, *widget.keys)
    choice = page.locator(PLAYER).first.get_by_label("run", exact=True)
    for name in choice.locator("option").all_inner_texts() or [""]:
        if name:
            choice.select_option(label=name)
        press(page, "Home")
        steps, places = int(state(page)["steps"]), set()
        for step in range(steps + 1):
            if width >= widget.narrowest and (step % max(1, steps // 5) == 0 or step == steps):
                assert_readable(page, f"{name} at {width} px, stop {step}")
            places.add(round(page.locator(".lk-bar").first.bounding_box()["y"]))
            page.keyboard.press("ArrowRight")
        assert len(places) == 1 or not widget.steady, (name, places)
        assert page.evaluate("document.documentElement.scrollWidth") <= width


@each_widget
@both_themes
def test_colours_stand_out(show: Callable, widget: Widget, theme: str) -> None:
    page = show(widget.make())
    paint(page, theme)
    for colours, grounds, least in widget.contrasts:
        found = contrasts(page, colours, grounds)
        assert len(found) == len(colours) * len(grounds)
        assert min(found.values()) >= least, min(found.items(), key=lambda item: item[1])


@each_widget
def test_dark_wherever_the_page_is_dark(show: Callable, widget: Widget) -> None:
    page = shown(show, widget)
    light = page.evaluate(COLOURS, widget.themed)
    paint(page, "dark")
    dark = page.evaluate(COLOURS, widget.themed)
    assert all(a != b for a, b in zip(light, dark)), (light, dark)
    page.evaluate("delete document.documentElement.dataset.theme; document.body.dataset.jpThemeLight = 'false'")
    assert page.evaluate(COLOURS, widget.themed) == dark
    by_itself = shown(show, widget, color_scheme="dark")
    assert by_itself.evaluate(COLOURS, widget.themed) == dark
    paint(by_itself, "light")
    assert by_itself.evaluate(COLOURS, widget.themed) == light


@each_widget
@both_themes
def test_axe_finds_nothing(show: Callable, widget: Widget, theme: str) -> None:
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="axe-playwright-python is not installed")
    page = show(*widget.many())
    paint(page, theme)
    press(page, *widget.keys, "End")
    found = axe.Axe().run(page, context=PLAYER, options={"preload": False})  # it would fetch the CSS again
    assert found.violations_count == 0, found.generate_report()


@each_widget
def test_printing_shows_the_end(show: Callable, widget: Widget) -> None:
    page = shown(show, widget)
    page.emulate_media(media="print")
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert state(page)["step"] == str(widget.steps) and page.locator(".lk-bar").is_hidden()


@each_widget
def test_without_javascript_it_can_be_read(show: Callable, widget: Widget) -> None:
    page, (selector, count, words) = show(widget.make(), wait=False, java_script_enabled=False), widget.told
    assert page.locator(selector).count() == count and words in page.inner_text("main")


def test_they_stand_beside_each_other(show: Callable) -> None:
    """Two of each on one page: none takes another's ids, and keys act on the one that has the focus."""
    page = show(*(widget.make() for widget in WIDGETS), *(widget.make() for widget in WIDGETS))
    assert page.locator(PLAYER).count() == 2 * len(WIDGETS)
    ids = page.eval_on_selector_all(f"{PLAYER} [id]", "all => all.map(e => e.id)")
    assert len(set(ids)) == len(ids) > 0
    page.locator(PLAYER).nth(len(WIDGETS) - 1).focus()
    page.keyboard.press("End")
    at = page.eval_on_selector_all(PLAYER, "all => all.map(e => +e.dataset.step)")
    assert [k for k, step in enumerate(at) if step] == [len(WIDGETS) - 1]


@each_widget
def test_frames(show: Callable, widget: Widget) -> None:
    """Frames are counted, not timed against a limit: a machine may be slow, but a widget must keep drawing."""
    page = show((widget.heaviest or widget.make)())
    press(page, *widget.keys)
    click(page, "Play")
    frames = page.evaluate(FRAMES)
    assert frames > 5 and state(page)["playing"] == "true"
