"""The memory player and the bars: their data against measured bytes and formulas; both in a real Chromium.

The network is blocked there; test_widgets_browser has the rest.
"""
from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

import pytest

from book.collectives import ring_all_reduce
from book.cost import ADAM_32, ADAM_MIXED, ADAM_MIXED_GRADIENTS_32, StateBytes, sharded_sent_bytes, state_bytes
from book.trace import Event, Trace
from book.widgets import memory_bars, memory_player
from book.widgets.memory import MemoryPlayer, begin, figures, told
from book.widgets.memory_run import Held, read_held
from book.words import in_bytes
from tests.memory import recorded, run_of
from tests.players import (assert_readable, axe_finds, caption, captions, contrasts, figures as figures_on_page, first,
                           paint, press, scrub, state, until)

FORWARD = ["all_gather", "forward", "free"]


@pytest.fixture(scope="module", params=range(4), ids=lambda stage: f"stage {stage}")
def step(request) -> tuple[int, Held, list[float]]:
    trace, sizes = run_of(request.param)
    return request.param, read_held(trace), sizes


def at_last(held: Held) -> dict[str, float]:
    """Bytes of each kind of state after the last action."""
    left = dict(held.start)
    for action in held.operations:
        left.update(dict(action.changes))
    return {kind: sum(b for (what, _), b in left.items() if what == kind) for kind in
            ("parameters", "gradients", "optimizer")}


def test_the_stage_and_the_units_are_inferred_from_the_run(step) -> None:
    stage, held, sizes = step
    assert held.zero_stage == stage and held.num_steps == 1
    assert held.units == dict(zip(("root", "block 0", "block 1"), sizes))


def test_bytes_held_and_sent_are_the_formulas(step) -> None:
    stage, held, sizes = step
    formula = state_bytes(sum(sizes) / 8, stage, 2, StateBytes(8, 8, 16))
    assert at_last(held) == {"parameters": formula.parameters, "gradients": 0, "optimizer": formula.optimizer}
    sent = sum(action.num_sent for action in held.operations)
    assert sent == sharded_sent_bytes(stage, 2, sum(sizes))
    rule = next(meaning for _, meaning in figures(held) if meaning.startswith("sent"))
    assert rule.endswith(f"of {in_bytes(sent, zeros=True)} = {3 if stage == 3 else 2}(N−1)/N·n")


def test_each_unit_is_reduced_once_and_gathered_as_its_stage_requires(step) -> None:
    stage, held, _ = step
    counts = {op: sorted(a.unit for a in held.operations if a.op == op) for op in ("all_gather", "reduce_scatter",
                                                                                "all_reduce", "free")}
    once = ["block 0", "block 1", "root"]
    gathers = {0: 0, 1: 1, 2: 1, 3: 2}[stage]
    assert counts == {"all_gather": sorted(once * gathers), "reduce_scatter": once if stage else [],
                      "all_reduce": [] if stage else once, "free": sorted(once * 2) if stage == 3 else []}


def test_the_order_of_stage_3() -> None:
    held = read_held(recorded(3))
    of_block = [action.op for action in held.operations if action.unit == "block 0"]
    assert of_block == [*FORWARD, "all_gather", "backward", "reduce_scatter", "free"]
    assert [action.op for action in held.operations[-2:]] == ["update", "drop"]
    assert max(held.totals()) > next(held.totals())


def test_figures_and_words_of_four_ranks() -> None:
    trace, sizes = run_of(3, 4)
    held, texts = read_held(trace), [stress + rest for stress, rest in told(read_held(trace))]
    sent, shard = (in_bytes(sizes[1] * part, zeros=True) for part in (3 / 4, 1 / 4))
    assert f"All ranks gather block 0: each sends {sent}; from here on each holds it whole." in texts
    keeps = f"each rank keeps its quarter of the mean gradient, {shard}; each sends {sent}."
    assert f"Reduce-scatter of block 0: {keeps}" in texts
    assert f"Block 0 is freed: each rank keeps its quarter, {shard}." in texts
    assert texts[-1].startswith("The gradients are dropped") and texts[-1].endswith("The step is over.")
    meanings = {meaning: value for value, meaning in figures(held)}
    after = in_bytes(state_bytes(sum(sizes) / 8, 3, 4, StateBytes(8, 0, 16)).total, zeros=True)
    assert meanings["held after the step: parameters/4 + optimizer/4"] == after


@pytest.mark.parametrize("stage", [1, 2])
def test_shards_with_separate_memory_are_shown_as_shards(stage: int) -> None:
    """They take more, and everything else is the same step."""
    trace, sizes = run_of(stage, own_shards=True)
    views, held = read_held(recorded(stage)), read_held(trace)
    assert held.zero_stage == stage and held.units == views.units
    done = [[(a.op, a.unit, a.num_sent) for a in one.operations] for one in (held, views)]
    assert done[0] == done[1]
    assert at_last(held)["parameters"] == at_last(views)["parameters"] + sum(sizes) / 2
    assert f", and {in_bytes(sum(sizes) / 2, zeros=True)} for a shard of its own" in begin(held)[1]


def test_several_collectives_for_a_unit_are_one_action() -> None:
    """As when a learner gathers parameter by parameter."""
    trace = recorded(3)
    parts = [replace(event, num_bytes=event.num_bytes * part) if event.unit and event.kind == "collective" else event
             for event in trace.events for part in ((0.25, 0.75) if event.kind == "collective" else (1,))]
    assert read_held(Trace(parts, 2, trace.clock, trace.source)) == read_held(trace)


def test_the_data_follow_every_change() -> None:
    """What the script adds up is what the trace says: bytes by lane and unit at the end, and what was sent."""
    held, run = read_held(recorded(3)), MemoryPlayer({"": recorded(3)}).data(False)["runs"][0]
    now = {(kind, unit): size for stop in run["stops"] for kind, unit, size, _ in stop["set"]}
    totals = [sum(size for (kind, _), size in now.items() if kind == k) for k in range(3)]
    assert totals == list(at_last(held).values())
    assert sum(stop["sent"] for stop in run["stops"]) == sum(action.num_sent for action in held.operations)


def looks(stage: int, lane: int) -> list[str]:
    """How block 1 looks in one lane, as often as that changes."""
    run = MemoryPlayer({"": recorded(stage)}).data(False)["runs"][0]
    changes = [change for stop in run["stops"] for change in stop["set"]]
    seen = [look for kind, unit, _, look in changes if (kind, unit) == (lane, 2)]
    return [look for k, look in enumerate(seen) if k == 0 or seen[k - 1] != look]


def test_the_drawn_state_of_parameters_and_gradients() -> None:
    assert {stage: looks(stage, 0) for stage in range(4)} == {
        0: ["whole"], **dict.fromkeys((1, 2), ["whole", "updated", "whole"]),
        3: ["shard", "whole", "shard", "whole", "shard"]}
    gradients = {0: ["own", "whole", ""], **dict.fromkeys((1, 2, 3), ["own", "shard", ""])}
    assert {stage: looks(stage, 1) for stage in range(4)} == gradients
    assert {stage: looks(stage, 2) for stage in range(4)} == {0: ["whole"], **dict.fromkeys((1, 2, 3), ["shard"])}


def test_measured_times_and_the_order_of_events_do_not_change_the_page() -> None:
    trace = recorded(3)
    rows = [replace(event, start_s=2 * event.start_s + 1, end_s=2 * event.end_s + 1) for event in trace.events]
    random.Random(0).shuffle(rows)
    other = Trace(rows, trace.world_size, trace.clock, trace.source, backend="nccl")
    page, again = MemoryPlayer({"": trace}), MemoryPlayer({"": other})
    assert page.html() == again.html() and again.data(True)["runs"][0]["source"] == "recorded from 2 processes on nccl"


def test_a_choice_of_runs_and_its_size() -> None:
    runs = {(stage, 2): recorded(stage) for stage in range(4)}
    player = memory_player(runs, labels=("stage", "ranks"), select=(3, 2))
    data = json.loads(player.payload)
    assert [axis["label"] for axis in data["axes"]] == ["stage", "ranks"] and data["runs"][0]["at"] == [3, 0]
    assert repr(player).startswith("What each rank holds in one training step: memory player of 4 runs")
    assert len(MemoryPlayer(runs).html()) < 60_000


@pytest.mark.parametrize("change, words", [
    (lambda e: replace(e, num_bytes=e.num_bytes + 8) if (e.rank, e.kind, e.op) == (1, "memory", "optimizer") else e,
     "ranks 0 and 1 do not"),
    (lambda e: replace(e, kind="compute") if e.kind == "memory" else e, "follow_units")])
def test_a_run_that_cannot_be_drawn_raises_a_clear_error(change, words) -> None:
    trace = recorded(3)
    with pytest.raises(ValueError, match=words):
        memory_player(Trace(map(change, trace.events), 2, trace.clock, trace.source))


def test_other_types_are_refused() -> None:
    with pytest.raises(TypeError, match="takes a trace"):
        memory_player(ring_all_reduce(2))
    with pytest.raises(ValueError, match="up to 8 ranks"):
        memory_player(Trace([], 9, "measured", "recorded"))
    with pytest.raises(ValueError, match="160"):
        memory_player(Trace([Event(0, "memory", "parameters", num_bytes=8.0, unit="a", start_s=0.0),
                             *(Event(0, "compute", "forward", unit="a", start_s=1.0 + k) for k in range(161))],
                            1, "measured", "recorded"))


def test_bars_say_the_bytes_in_words() -> None:
    text = memory_bars().shown.words()
    assert all(size in text for size in ("120 GB", "31.4 GB", "16.6 GB", "1.88 GB")), "rajbhandari2020, figure 1"
    assert repr(memory_bars(1.5e9, 8, 2)).endswith("1.5 billion parameters, 8 ranks, mixed, by formula")


@pytest.mark.parametrize("options, words", [
    ({"num_ranks": 0}, "1 to 1024 ranks"), ({"num_ranks": 2.5}, "a whole number of ranks, not .* 2.5 ranks"),
    ({"zero_stage": -1}, "ZeRO stages 0 to 3 .* not stage -1"), ({"zero_stage": 7}, "not stage 7"),
    ({"num_parameters": 5}, "million")])
def test_bars_refuse_invalid_options(options, words) -> None:
    with pytest.raises(ValueError, match=words):
        memory_bars(**options)
    with pytest.raises(TypeError, match="no trace"):
        memory_bars().shown.with_trace(None)


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
    assert figures_on_page(page)["held by each rank now"].replace("\u00a0", " ") == in_bytes(whole / 2, zeros=True)
    press(page, "End")
    found = {meaning: value.replace("\u00a0", " ") for meaning, value in figures_on_page(page).items()}
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
