"""The chart of layouts: what is thinned out and what is kept, its numbers, and its page without JavaScript."""
from __future__ import annotations

import json
import re
from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from book.cost import Transformer, search
from book.cost.step import PARTS
from book.cost.published import A100
from book.widgets import layout_chart
from book.widgets.layouts import GROUPED, MOST_GROUPS, layouts_payload, shown
from book.widgets.layouts import LayoutChart
from tests.layouts import few, many, none, rare
from tests.players import html_of


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
