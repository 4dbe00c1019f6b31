"""The memory player and the bars in a real Chromium, with the network blocked; test_widgets_browser has the rest."""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import pytest

from book.cost import ADAM_32, ADAM_MIXED, ADAM_MIXED_GRADIENTS_32, state_bytes
from book.widgets import memory_bars, memory_player
from book.widgets.memory_run import read_held
from book.widgets.memory import begin, told
from book.words import in_bytes
from tests.memory import recorded, run_of
from tests.players import (assert_readable, axe_finds, caption, captions, contrasts, figures, first, paint, press,
                           scrub, state, until)

PIECES = """() => [...document.querySelectorAll(
  '.lk-stage > svg:first-child > g:first-of-type > rect[fill^="var(--r"]')].map(
    r => [+r.getAttribute('y'), r.getAttribute('fill')])"""
SAME = """points => points.map(([n, stage, ranks, each]) => lockstep.plan_bytes.state_bytes(n, stage, ranks, each))"""
FEWEST = "([n, stage, each, gpu]) => lockstep.memory_bars.fewest(n, stage, each, gpu)"
EACH = (ADAM_MIXED, ADAM_MIXED_GRADIENTS_32, ADAM_32)


def lane(page: Any, rank: int, kind: int) -> list[str]:
    """The colours in a lane of a rank, left to right."""
    rows = page.evaluate(PIECES)
    tops = page.eval_on_selector_all(".lk-slot", "all => [...new Set(all.map(r => +r.getAttribute('y')))]")
    return [fill for y, fill in rows if abs(y - tops[3 * rank + kind]) < 0.1]


def beside_ranks(page: Any) -> list[str]:
    """What stands below each rank's name: all that it holds."""
    texts = page.eval_on_selector_all('.lk-stage text[x="14"]', "all => all.map(text => text.textContent)")
    return [text.replace("\u00a0", " ") for text in texts if text.endswith("B")]


def test_each_stop_is_described(show: Callable) -> None:
    trace = recorded(3)
    page = show(memory_player(trace), reduced_motion="reduce")
    assert captions(page) == [stress + rest for stress, rest in [begin(read_held(trace)), *told(read_held(trace))]]


def test_a_unit_fills_when_it_is_gathered_and_empties_when_it_is_freed(show: Callable) -> None:
    page = show(memory_player(recorded(3)), reduced_motion="reduce")
    mine, both = ["var(--r0)"], ["var(--r0)", "var(--r1)"]
    seen = []
    for _ in range(6):
        seen.append(lane(page, 0, 0))
        press(page, "ArrowRight")
    assert seen == [mine * 3, both + mine * 2, both + mine * 2, both * 2 + mine, both * 2 + mine, both + mine * 2]
    assert lane(page, 1, 0)[2] == "var(--r1)"


def test_figures_are_updated_at_each_stop(show: Callable) -> None:
    _, sizes = run_of(3)
    page, whole = show(memory_player(recorded(3)), reduced_motion="reduce"), sum(sizes)
    press(page, "Home")
    assert figures(page)["held by each rank now"].replace("\u00a0", " ") == in_bytes(whole / 2, zeros=True)
    press(page, "End")
    found = {meaning: value.replace("\u00a0", " ") for meaning, value in figures(page).items()}
    assert found["held by each rank now"] == in_bytes(whole * 3 / 2, zeros=True)
    assert beside_ranks(page) == [in_bytes(whole * 3 / 2, zeros=True)] * 2
    sent = in_bytes(3 / 2 * whole, zeros=True)
    assert found[f"sent by each rank so far, of {sent} = 3(N−1)/N·n"] == sent


def test_the_reader_chooses_stage_and_ranks(show: Callable) -> None:
    runs = {(0, 2): recorded(0), (3, 2): recorded(3), (3, 4): recorded(3, 4)}
    page = show(memory_player(runs, labels=("stage", "ranks"), select=(3, 2)), reduced_motion="reduce")
    widths = "all => all.map(r => +r.getAttribute('width'))"
    press(page, "End")
    sharded = page.eval_on_selector_all(".lk-hold", widths)
    page.get_by_label("ranks").select_option(label="4")
    until(page, ranks=4, step=state(page)["steps"])
    assert page.eval_on_selector_all(".lk-hold", widths)[0] == pytest.approx(sharded[0] / 2, rel=0.05)
    page.get_by_label("ranks").select_option(label="2")
    page.get_by_label("stage").select_option(label="0")
    assert caption(page).startswith("The gradients are dropped")
    assert page.eval_on_selector_all(".lk-hold", widths)[0] == pytest.approx(2 * sharded[0], rel=0.02)


def test_shards_move_while_a_collective_runs(show: Callable) -> None:
    page = show(memory_player(recorded(3, 4)))
    page.evaluate("""() => { window.seen = new Set(); new MutationObserver(() => document.querySelectorAll(
        '.lk-move g').forEach(g => seen.add(g.getAttribute('transform')))).observe(document.body,
        {subtree: true, attributes: true}) }""")
    press(page, "ArrowRight")
    until(page, step=1, playing="false")
    assert page.locator(".lk-move g").count() == 12, "each shard to each other rank"
    assert page.evaluate("seen.size") > 24
    assert page.locator(".lk-move").evaluate("e => e.style.visibility") == "hidden"


def test_scrubbing_goes_to_a_stop(show: Callable) -> None:
    page = show(memory_player(recorded(3)))
    scrub(page, 0.5)
    k = int(state(page)["step"])
    assert 0 < k < int(state(page)["steps"]) and page.get_by_role("slider").get_attribute("aria-valuenow") == str(k)


# the bars
def test_the_script_has_the_formula_of_python(show: Callable) -> None:
    points = [(n, stage, ranks, each) for n in (124e6, 7.5e9, 175e9, 3.3e9) for stage in range(4)
              for ranks in (1, 2, 3, 64, 1000, 1024) for each in EACH]
    held = [state_bytes(n, stage, ranks, each) for n, stage, ranks, each in points]
    page = show(memory_bars())
    found = page.evaluate(SAME, [[n, stage, ranks, asdict(each)] for n, stage, ranks, each in points])
    assert found == [pytest.approx([h.parameters, h.gradients, h.optimizer], rel=1e-12) for h in held]


def test_the_fewest_ranks_are_the_first_that_fit(show: Callable) -> None:
    page, n, gpu = show(memory_bars()), 7.5e9, 40e9
    for stage in range(4):
        found = page.evaluate(FEWEST, [n, stage, asdict(ADAM_MIXED), gpu])
        fits = [ranks for ranks in range(1, 1025) if state_bytes(n, stage, ranks).total <= gpu]
        assert found == (fits[0] if fits else float("inf")), stage


def test_the_readers_choice(show: Callable) -> None:
    page = show(memory_bars())
    assert caption(page).startswith("Stage 3 on 64 ranks: 1.88 GB on each")
    page.get_by_label("ranks", exact=True).fill("48")
    page.get_by_label("precision").select_option(index=2)
    page.get_by_label("model").select_option(label="13 B")
    page.locator("g[data-stage='1']").click()
    total = state_bytes(13e9, 1, 48, ADAM_32).total
    assert float(state(page)["bytes"]) == total and caption(page).startswith(
        f"Stage 1 on 48 ranks: {in_bytes(total, zeros=True)} on each, more than a GPU of 80 GB has")
    assert page.get_by_label("ZeRO stage").input_value() == "1"
    page.get_by_label("model").select_option(label="your own")
    page.get_by_label("billions of parameters").fill("0.5")
    page.get_by_label("ranks, by powers of two").fill("10")
    assert state(page)["ranks"] == "1024" and float(state(page)["bytes"]) == state_bytes(5e8, 1, 1024, ADAM_32).total


def test_bars_by_keyboard(show: Callable) -> None:
    page = show(memory_bars())
    page.evaluate("addEventListener('keydown', e => { window.leaked = e.key })")
    page.locator("g[data-stage='3']").focus()
    for _ in range(2):
        page.keyboard.press("Shift+Tab")
    page.keyboard.press("Enter")
    assert state(page)["stage"] == "1" and page.evaluate("document.activeElement.dataset.stage") == "1"
    assert page.evaluate("window.leaked") is None


@pytest.mark.parametrize("width", first(320, 390, 760))
def test_bars_can_be_read(show: Callable, width: int) -> None:
    page = show(memory_bars(), width=width, height=1400)
    for index in range(4):
        page.get_by_label("ZeRO stage").select_option(index=index)
        page.get_by_label("model").select_option(index=5 - index)
        assert_readable(page, f"stage {index} at {width} px")
        assert page.evaluate("document.documentElement.scrollWidth") <= width


@pytest.mark.parametrize("theme", first("light", "dark"))
def test_bars_in_both_themes(show: Callable, theme: str) -> None:
    page = show(memory_bars())
    paint(page, theme)
    assert min(contrasts(page, [f"m{i}" for i in range(4)], ["bg"]).values()) >= 4.5
    assert not axe_finds(page)


def test_bars_without_javascript(show: Callable) -> None:
    page = show(memory_bars(), wait=False, java_script_enabled=False)
    assert page.locator("tr").count() == 5 and "31.4 GB" in page.inner_text("main")
