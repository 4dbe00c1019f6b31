"""The chart of layouts: what is thinned out and what is kept, its page without JavaScript, and in a real Chromium."""
from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest

from book.cost import Transformer, search
from book.cost.published import A100
from book.cost.step import PARTS
from book.widgets import layout_chart
from book.widgets.layouts import GROUPED, MOST_GROUPS, LayoutChart, layouts_payload, shown
from tests.layouts import few, many, none, rare
from tests.players import html_of, press, until


@pytest.mark.parametrize("make", [few, many])
def test_the_fastest_layout_that_fits_is_shown_for_every_choice(make):
    found = make()
    here = set(shown(found).tolist())
    columns = [found.layouts.array(name) for name in GROUPED]
    step_s = found.estimates.array("step_s")
    num_groups = 0
    for values in product(*(np.unique(column) for column in columns)):
        group = np.logical_and.reduce([column == value for column, value in zip(columns, values)])
        fitting = group & found.fits
        if fitting.any():
            assert step_s[fitting].min() == min(step_s[i] for i in here if fitting[i])
        num_groups += group.any()
        assert group.any() == any(group[i] for i in here)
    assert num_groups <= MOST_GROUPS  # else the slowest would not be there
    assert set(found.front().tolist()) <= here and found.best in here and len(here) < len(found)


def test_layouts_are_sorted_by_speed_and_carry_their_estimates():
    found, chosen = few(), shown(few())
    data = layouts_payload(found)
    columns = data["columns"]
    assert sorted(columns["step"]) == columns["step"] and len(columns["step"]) == len(chosen)
    for row, position in enumerate(chosen):
        layout, cost = found.layouts[int(position)], found.estimates[int(position)]
        assert (columns["pp"][row], columns["dp"][row], columns["tp"][row]) == (layout.pp, layout.dp, layout.tp)
        assert (columns["b"][row], columns["v"][row], columns["zero"][row], columns["sp"][row]) == (
            layout.micro_batch_size, layout.stages_per_rank, layout.zero_stage, layout.sequence_parallel)
        assert (None, "selective", "half", "full")[columns["how"][row] + 1] == layout.recompute
        held = sum(columns[name][row] for name in ("state", "kept", "moment")) * 1e7
        assert held == pytest.approx(cost.memory_bytes, abs=1.5e7)
        assert columns["step"][row] == pytest.approx(cost.step_s, rel=1e-3)
        assert columns["mfu"][row] / 1000 == pytest.approx(cost.mfu, abs=5e-4)
        assert columns["fits"][row] == found.fits[position]
        assert [part[row] / 1000 for part in data["parts"]] == pytest.approx(
            [getattr(cost, part) / cost.step_s for part in PARTS], abs=5e-4)
    assert (data["total"], data["fitting"], data["usable"]) == (len(found), found.fits.sum(), 360)


def test_cp_and_ep_are_told_apart_where_there_are_any():
    """Of each the fastest is there; charts without them have no such columns."""
    data, chosen = layouts_payload(rare()), shown(rare())
    for name in ("cp", "ep"):
        assert data["columns"][name] == rare().layouts.array(name)[chosen].tolist()
        assert set(data["columns"][name]) == set(rare().layouts.array(name).tolist()) and name not in layouts_payload(
            few())["columns"]


def test_a_page_is_the_same_each_time_and_light():
    first, second = (html_of(layout_chart(many())) for _ in range(2))
    assert first == second
    payload = re.search(r"data-lockstep-layouts='([^']*)'", first)[1]
    assert len(payload) <= 60_000 and json.loads(payload)["title"] == "175 billion parameters on 1,024 GPUs"


def test_without_javascript_the_front_is_a_table():
    chart = LayoutChart(few())
    front = [i for i in few().front() if few().fits[i]]
    assert chart.words().count("<tr>") == 1 + len(front)
    for position in front:
        assert f"<td>{few().layouts[int(position)]}</td>" in chart.words()
    assert f"{len(few())} layouts {few().fits.sum()} fit" in chart.words()
    assert LayoutChart(none()).words().count("<tr>") == 1 + len(none().front())


def test_a_chart_says_what_it_shows_and_can_show_another():
    chart = LayoutChart(few(), "Mine")
    assert chart.text() == f"Mine: {len(few())} layouts, {few().fits.sum()} fit, modelled"
    assert chart.with_trace(none()).text().startswith("Mine: ") and chart.with_trace(none()).found is none()
    live = layout_chart(few())
    live.trace = none()
    assert json.loads(live.payload)["fitting"] == 0
    with pytest.raises(AttributeError, match="no trace behind this widget"):
        live.trace


def test_invalid_input_raises_a_clear_error():
    with pytest.raises(TypeError, match="takes what search"):
        layout_chart([])
    with pytest.raises(ValueError, match="found no layout"):
        layout_chart(search(Transformer(6, 48, 4), replace(A100, num_gpus=11), 4))


# In a real Chromium: what only it does
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
