"""What every widget does, in a real Chromium, on static pages of its own HTML and assets, with the network blocked."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from book.collectives import ring_all_reduce
from book.widgets import play
from book.widgets.registry import DATA_VERSION
from tests.players import FRAMES, PLAYER, WAIT_MS, WALK, axe_finds, click, contrasts, first, paint, press, state, until
from tests.widget_rows import WIDGETS, Widget

SOME = WIDGETS[::-(-len(WIDGETS) // 3)]  # three, of different families
each_widget = pytest.mark.parametrize("widget", WIDGETS, ids=str)
THEMES = ("light", "dark")
COLOURS = """selector => [getComputedStyle(document.querySelector('.lockstep-player')).backgroundColor,
                          getComputedStyle(document.querySelector(selector)).fill]"""
NAME = "(e => e.ariaLabel || e.textContent || e.title)(document.activeElement)"
LEAKS = "addEventListener('keydown', e => { window.leaked = (window.leaked || '') + e.key })"
WATCH = """moving => { window.seen = new Set(); new MutationObserver(() => seen.add(eval(moving)))
             .observe(document.body, {subtree: true, attributes: true, childList: true}) }"""


def shown(show: Callable, widget: Widget, **options: Any) -> Any:
    """A page with a small one, at its start."""
    page = show(widget.make(), **options)
    assert state(page)["playing"] == "false"
    press(page, *widget.keys, "Home")
    until(page, step=0, steps=widget.steps, playing="false")
    return page


def hasten(page: Any) -> None:
    """Let it play four times as fast."""
    for speed in ("1×", "2×"):
        page.get_by_role("button", name=speed).click()


def everywhere(*values: Any) -> list[Any]:
    """Each widget with each of these values; `make test` takes some widgets with the first value."""
    return [pytest.param(widget, value, id=f"{value}-{widget}", marks=in_every_run(widget, value == values[0]))
            for value in values for widget in WIDGETS]


def in_every_run(widget: Widget, first: bool = True) -> Any:
    """The marks of a test of this widget: none if `make test` runs it."""
    return () if first and widget in SOME else pytest.mark.slow


some_widgets = pytest.mark.parametrize("widget", [pytest.param(widget, marks=in_every_run(widget), id=str(widget))
                                                  for widget in WIDGETS])


@some_widgets
def test_transport(show: Callable, widget: Widget) -> None:
    page = shown(show, widget)
    click(page, "Play")
    until(page, playing="true")
    click(page, "Pause")
    until(page, playing="false")
    click(page, "Back to the start")
    until(page, step=0)
    hasten(page)
    page.evaluate(WATCH, widget.moving)
    at_stops = {page.evaluate(widget.moving)}
    for name, step in (("One step forward", 1), ("One step forward", 2), ("One step back", 1)):
        click(page, name)
        until(page, step=step, playing="false")
        at_stops.add(page.evaluate(widget.moving))
    assert set(page.evaluate("[...seen]")) - at_stops, "it moved between stops"
    press(page, "End", "ArrowLeft", "ArrowLeft")
    click(page, "Play")
    until(page, step=widget.steps, playing="false")
    assert page.locator(".lk-scrub").get_attribute("aria-valuemax") == str(widget.steps)


@some_widgets
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


@some_widgets
def test_every_control_can_be_reached_by_tab(show: Callable, widget: Widget) -> None:
    page, reached = show(widget.make()), []
    page.evaluate("document.body.append(Object.assign(document.createElement('button'), {textContent: 'after it'}))")
    for _ in (*widget.tabs, "after it"):
        page.keyboard.press("Tab")
        reached.append(page.evaluate(NAME))
    assert reached == [*widget.tabs, "after it"]


@pytest.mark.parametrize("widget, played", everywhere("two steps reduced", "all reduced", "all"))
def test_reduced_motion_shows_stops_only(show: Callable, widget: Widget, played: str) -> None:
    page, last = shown(show, widget, reduced_motion="reduce"), 2 if "two" in played else widget.steps
    at_stops = []
    for _ in range(widget.steps + 1):
        at_stops.append(page.evaluate(widget.moving))
        page.keyboard.press("ArrowRight")
    page.emulate_media(reduced_motion="reduce" if "reduced" in played else "no-preference")
    press(page, "Home")
    page.evaluate(WATCH, widget.moving)
    hasten(page)
    click(page, "Play")
    page.wait_for_function("([at, last]) => +document.querySelector(at).dataset.step >= last", arg=[PLAYER, last],
                           timeout=WAIT_MS)
    press(page, "Home")
    seen = set(page.evaluate("[...seen]"))
    if "reduced" in played:
        assert set(at_stops[1:last + 1]) <= seen <= set(at_stops), seen
    else:
        assert seen - set(at_stops), seen


@pytest.mark.parametrize("widget, width", everywhere(390, 760, 320))
def test_nothing_overlaps_and_nothing_moves(show: Callable, widget: Widget, width: int) -> None:
    """At every few stops of every run all texts can be read, and the controls stay where they are."""
    page = show(*widget.many(), width=width, height=1500, reduced_motion="reduce")
    press(page, *widget.keys)
    choice = page.locator(PLAYER).first.get_by_label("run", exact=True)
    for name in choice.locator("option").all_inner_texts() or [""]:
        if name:
            choice.select_option(label=name)
        unreadable, num_places = page.evaluate(WALK, 5 if width >= widget.narrowest else 0)
        assert not unreadable, (name, unreadable)
        assert num_places == 1 or not widget.steady, name
        assert page.evaluate("document.documentElement.scrollWidth") <= width


@some_widgets
def test_colours_stand_out(show: Callable, widget: Widget) -> None:
    page = show(widget.make())
    for theme in THEMES:
        paint(page, theme)
        for colours, grounds, least in widget.contrasts:
            found = contrasts(page, colours, grounds)
            assert len(found) == len(colours) * len(grounds)
            assert min(found.values()) >= least, (theme, min(found.items(), key=lambda item: item[1]))


@some_widgets
def test_dark_if_the_page_is_dark(show: Callable, widget: Widget) -> None:
    page = shown(show, widget)
    light = page.evaluate(COLOURS, widget.themed)
    paint(page, "dark")
    dark = page.evaluate(COLOURS, widget.themed)
    assert all(a != b for a, b in zip(light, dark)), (light, dark)
    page.evaluate("delete document.documentElement.dataset.theme; document.body.dataset.jpThemeLight = 'false'")
    assert page.evaluate(COLOURS, widget.themed) == dark


@pytest.mark.parametrize("widget", first(*WIDGETS), ids=str)
def test_dark_if_the_system_is_dark(show: Callable, widget: Widget) -> None:
    """Where the page says nothing; what the page says goes first."""
    light = shown(show, widget).evaluate(COLOURS, widget.themed)
    page = shown(show, widget, color_scheme="dark")
    dark = page.evaluate(COLOURS, widget.themed)
    assert all(a != b for a, b in zip(light, dark)), (light, dark)
    paint(page, "light")
    assert page.evaluate(COLOURS, widget.themed) == light
    paint(page, "dark")
    assert page.evaluate(COLOURS, widget.themed) == dark


@pytest.mark.slow
@pytest.mark.parametrize("theme", THEMES)
@each_widget
def test_axe_finds_nothing(show: Callable, widget: Widget, theme: str) -> None:
    page = show(*widget.many())
    paint(page, theme)
    press(page, *widget.keys, "End")
    assert not axe_finds(page)


def test_axe_finds_nothing_in_one_of_each(show: Callable) -> None:
    with_choices = play({"two": ring_all_reduce(2), "three": ring_all_reduce(3)})
    assert not axe_finds(show(with_choices, *(widget.make() for widget in WIDGETS)))


@some_widgets
def test_printing_shows_the_end(show: Callable, widget: Widget) -> None:
    page = shown(show, widget)
    page.emulate_media(media="print")
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert state(page)["step"] == str(widget.steps) and page.locator(".lk-play").is_hidden()


@some_widgets
def test_without_javascript_it_can_be_read(show: Callable, widget: Widget) -> None:
    page, (selector, count, words) = show(widget.make(), wait=False, java_script_enabled=False), widget.told
    assert page.locator(selector).count() == count and words in page.inner_text("main")


@some_widgets
def test_data_of_another_version_keep_their_words_with_a_message(show: Callable, widget: Widget,
                                                                 monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("book.widgets.page.DATA_VERSION", DATA_VERSION - 1)
    page, (selector, count, words) = show(widget.make(), wait=False), widget.told
    assert page.inner_text("[role=alert]") == (f"These data have version {DATA_VERSION - 1}, and this page draws "
                                               f"version {DATA_VERSION}: run the cell again.")
    assert page.locator(selector).count() == count and words in page.inner_text("main")


def test_two_of_each_work_on_one_page(show: Callable) -> None:
    """Two of each on one page: none takes another's ids, and keys act on the one that has the focus."""
    page = show(*(widget.make() for widget in WIDGETS), *(widget.make() for widget in WIDGETS))
    assert page.locator(PLAYER).count() == 2 * len(WIDGETS)
    ids = page.eval_on_selector_all(f"{PLAYER} [id]", "all => all.map(e => e.id)")
    assert len(set(ids)) == len(ids) > 0
    page.locator(PLAYER).nth(len(WIDGETS) - 1).focus()
    page.keyboard.press("End")
    at = page.eval_on_selector_all(PLAYER, "all => all.map(e => +e.dataset.step)")
    assert [k for k, step in enumerate(at) if step] == [len(WIDGETS) - 1]


@pytest.mark.slow
@each_widget
def test_frames(show: Callable, widget: Widget) -> None:
    """Frames are counted, not timed against a limit: a machine may be slow, but a widget must keep drawing."""
    page = show((widget.heaviest or widget.make)())
    press(page, *widget.keys)
    click(page, "Play")
    assert page.evaluate(FRAMES, 6) and state(page)["playing"] == "true"
