"""The chart of layouts in a real Chromium: what only it does."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

from book.widgets import layout_chart
from book.widgets.layouts import shown
from tests.layouts import few, none, rare
from tests.players import press, until

CAPTION = ".lk-caption"


def fitting() -> list[str]:
    """The names of the layouts that the chart opens with, fastest first."""
    return [str(few().layouts[int(i)]) for i in shown(few()) if few().fits[i]]


def test_arrow_keys_visit_all_layouts_by_speed_with_pythons_names(show: Callable) -> None:
    page, names = show(layout_chart(few())), fitting()
    until(page, left=len(names), layout=names[0])
    for name in names[1:]:
        press(page, "ArrowDown")
        until(page, layout=name)
        assert name in page.inner_text(CAPTION)
    press(page, "ArrowDown")
    until(page, layout=names[-1], step=0)
    press(page, "ArrowUp")
    until(page, layout=names[-2])


def test_steps_follow_the_pareto_front(show: Callable) -> None:
    page = show(layout_chart(few()), reduced_motion="reduce")
    front = [int(i) for i in few().front() if few().fits[i]]
    until(page, steps=len(front) - 1, step=0, layout=few().layouts[front[0]])
    for step, position in enumerate(front[1:], 1):
        press(page, "ArrowRight")
        until(page, step=step, playing="false", layout=few().layouts[position])
    press(page, "End")
    until(page, layout=few().layouts[front[-1]])
    fastest, leanest = few().estimates[front[0]], few().estimates[front[-1]]
    assert f"{leanest.step_s / fastest.step_s - 1:.1%}".replace("%", "\u00a0% longer") in page.inner_text(CAPTION)
    assert " less." in page.inner_text(CAPTION)  # the last one on the front needs the least memory


def choose(page: Any, **values: str) -> None:
    for label, value in values.items():
        page.get_by_label(label, exact=True).select_option(label=value)


def test_filters_keep_the_matching_layouts(show: Callable) -> None:
    page, found = show(layout_chart(few())), few()
    layouts = [(found.layouts[int(i)], bool(found.fits[i])) for i in shown(found)]

    def left(wanted: Callable) -> int:
        return sum(fits and wanted(layout) for layout, fits in layouts)

    choose(page, tp="2")
    until(page, left=left(lambda layout: layout.tp == 2))
    choose(page, recompute="full", ZeRO="0")
    until(page, left=left(lambda layout: (layout.tp, layout.recompute, layout.zero_stage) == (2, "full", 0)))
    choose(page, tp="any", recompute="any", ZeRO="any")
    page.get_by_role("button", name="only what fits").click()
    until(page, left=len(layouts), layout=layouts[0][0])
    assert page.locator(".lk-point:not(.gone)").count() == len(layouts)
    assert page.locator(".lk-point.toobig").count() == sum(not fits for _, fits in layouts)
    choose(page, pp="4", tp="4")
    until(page, left=0, steps=0, layout="")
    assert "No layout is left" in page.inner_text(CAPTION)
    for key in ("ArrowDown", "ArrowRight", "End", "Home", " "):
        press(page, key)
    until(page, step=0, left=0)


def test_a_point_can_be_hovered_and_touched(show: Callable) -> None:
    page, names = show(layout_chart(few())), fitting()
    until(page, layout=names[0])
    slowest = page.locator(".lk-point:not(.gone)").last.bounding_box()
    x, y = slowest["x"] + slowest["width"] / 2, slowest["y"] + slowest["height"] / 2
    page.mouse.move(x, y)
    until(page, layout=names[-1])
    page.mouse.move(5, 5)
    until(page, layout=names[0])
    page.mouse.click(x, y)
    page.mouse.move(5, 5)
    until(page, layout=names[-1])
    press(page, "Home")
    until(page, layout=names[-1])  # already at the start: nothing moved
    press(page, "End")
    page.wait_for_function("name => document.querySelector('.lockstep-player').dataset.layout !== name", arg=names[-1])


def test_figures_and_bands_are_those_of_the_layout(show: Callable) -> None:
    page, best = show(layout_chart(few())), few().estimates[few().best]
    until(page, step=0)
    text = page.inner_text(".lockstep-player").replace("\u00a0", " ")
    assert f"{best.mfu:.1%}".replace("%", " %") in text and f"state {best.state_bytes / 1e9:.1f} GB" in text
    assert f"products {best.matmul_s / best.step_s:.1%}".replace("%", " %") in text
    widths = page.eval_on_selector_all(".lk-band i", "all => all.map(e => parseFloat(e.style.width))")
    usable = 0.9 * 4e9
    assert abs(widths[0] - 100 * best.state_bytes / usable) < 0.5 and abs(sum(widths[3:]) - 100) < 0.6


def test_if_nothing_fits_all_layouts_are_shown_with_a_note(show: Callable) -> None:
    page = show(layout_chart(none()))
    until(page, left=len(shown(none())))
    assert "Does not fit." in page.inner_text(CAPTION) and "too much" in page.inner_text(".lockstep-player")


def test_cp_and_ep_have_names_and_filters_where_there_are_any(show: Callable) -> None:
    page, found = show(layout_chart(rare())), rare()
    chosen = [found.layouts[int(i)] for i in shown(found) if found.fits[i]]
    until(page, layout=chosen[0])
    choose(page, cp="4", ep="8")
    both = [layout for layout in chosen if layout.cp == 4 and layout.ep == 8]
    until(page, left=len(both), layout=both[0])
    assert "× cp 4, ep 8, micro-batch" in page.inner_text(CAPTION)
    assert show(layout_chart(few())).get_by_label("cp", exact=True).count() == 0
