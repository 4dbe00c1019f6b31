"""The pipeline player in a real Chromium, on static pages of its own HTML and assets, with the network blocked."""
from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from book.cost import Link
from book.pipelines import gpipe, interleaved, one_f_one_b, zero_bubble
from book.replay import bubble
from book.schedule import Action, PipelineSchedule
from book.simulate import simulate_pipeline
from book.trace import Trace
from book.widgets import pipeline_player, pipeline_race
from tests.players import assert_readable, caption, captions, figures, first, press, scrub, state
from tests.test_pipeline_widget import WRONG, recorded
from tests.widget_rows import PIPELINES


def kept(page: Any) -> str:
    """The micro-batches that are written in the strips of what is kept, rank by rank."""
    return "".join(page.eval_on_selector_all("g.in text", "all => all.map(e => e.textContent)"))


def texts(page: Any, start: str) -> list[str]:
    """The small texts beside the strips that begin so, rank by rank."""
    all_texts = page.eval_on_selector_all(".lk-tiny", "all => all.map(e => e.textContent)")
    return [text for text in all_texts if text.startswith(start)]


def test_each_stop_is_described(show: Callable) -> None:
    page = show(pipeline_player(one_f_one_b(2, 3)), reduced_motion="reduce")
    assert captions(page) == [
        "Rank 0 starts the forward of micro-batch 0. The other rank waits for what comes from there.",
        "Ranks 0 and 1 start forwards of micro-batches 1 and 0.",
        "Rank 1 starts the backward of micro-batch 0. Rank 0 holds 2 micro-batches, the most it ever will: it may not "
        "start the next forward until a backward has freed one. Rank 0 waits: the gradient of micro-batch 0 has not "
        "come from stage 1.",
        "Rank 1 starts the forward of micro-batch 1. Rank 0 starts the backward of micro-batch 0.",
        "Rank 1 starts the backward of micro-batch 1.",
        "Rank 0 starts the forward of micro-batch 2.",
        "Rank 1 starts the forward of micro-batch 2. Rank 0 starts the backward of micro-batch 1.",
        "Rank 1 starts the backward of micro-batch 2.",
        "Rank 0 waits: the gradient of micro-batch 2 has not come from stage 1.",
        "Rank 0 starts the backward of micro-batch 2. Rank 1 is done.",
        "Every micro-batch has gone forward and back on every stage. Done after 12 ms."]


def test_split_backwards_and_second_stages_are_described(show: Callable) -> None:
    page = show(pipeline_player(zero_bubble(4, 2)), reduced_motion="reduce")
    said = captions(page)
    assert ("Rank 1 starts the forward of micro-batch 1 on stage 2. Rank 0 starts the input gradient of micro-batch 0 "
            "on stage 3. Rank 0 holds 3 forwards, the most it ever will: it may not start the next forward until a "
            "backward has freed one.") in said
    assert ("Rank 1 starts the input gradient of micro-batch 1 on stage 1. Rank 0 waits: the gradient of micro-batch 1 "
            "has not come from stage 1.") in said
    assert "Ranks 0 and 1 start weight gradients of micro-batches 0 and 1." in said


def test_messages_in_flight_are_described_and_drawn(show: Callable) -> None:
    """A message longer than what a rank does meanwhile is waited for, and travels from lane to lane."""
    page = show(pipeline_player(simulate_pipeline(gpipe(2, 2), 1e-3, 2e-3, link=Link(2.5e-3, 1e9))))
    scrub(page, 0.2)
    assert page.get_by_role("slider").get_attribute("aria-valuetext") == "3.2 ms of 16 ms"
    assert caption(page).startswith("Rank 0 holds 2 micro-batches, the most it ever will. Rank 0 waits: the gradient "
                                    "of micro-batch 0 has not come from stage 1.")
    scrub(page, 0.1)
    [early] = page.eval_on_selector_all(".lk-chip:not(.off)", "all => all.map(e => e.getBoundingClientRect().top)")
    scrub(page, 0.2)
    chips = page.eval_on_selector_all(".lk-chip:not(.off)",
                                      "all => all.map(e => [e.textContent, e.getBoundingClientRect().top])")
    assert chips[0][0] == "0↓" and chips[0][1] > early + 10
    scrub(page, 0.9)
    assert page.locator(".lk-chip:not(.off)").all_inner_texts() in ([], ["1↑"])


def test_strips_show_kept_activations(show: Callable) -> None:
    page = show(pipeline_player(one_f_one_b(3, 4)), reduced_motion="reduce")
    for step in range(4):
        press(page, *["ArrowRight"] * (step > 0))
    assert kept(page) == "012" "01" "0"
    assert texts(page, "activations") == [f"activations of {n}" for n in (
        "3 micro-batches", "2 micro-batches", "1 micro-batch")]
    press(page, "End")
    assert kept(page) == "" and texts(page, "idle") == ["idle 6 ms"] * 3


@pytest.mark.parametrize("name", first("ZB-V", "interleaved", "1F1B", "GPipe", num=2))
def test_figures_are_those_of_python(show: Callable, name: str) -> None:
    schedule = PIPELINES[name]
    page, found = show(pipeline_player(schedule)), bubble(simulate_pipeline(schedule, 1e-3, 2e-3))
    values = list(figures(page).values())
    assert values[0] == f"{100 * found.share:.1f} %" and values[2] == str(max(schedule.peak_in_flight()))
    press(page, "End")
    assert caption(page).endswith(f"Done after {found.step_s * 1e3:g} ms.")
    assert texts(page, "idle") == [f"idle {idle_s * 1e3:.0f} ms" for idle_s in found.idle_s]
    drawn = page.eval_on_selector_all(".lk-move .lk-block", "all => all.map(e => e.classList[1])")
    assert sorted(drawn) == sorted("k" + action.kind for action in schedule.actions)


def test_a_second_stage_carries_a_line(show: Callable) -> None:
    page = show(pipeline_player(interleaved(6, 4, 3)))
    count = "all => all.map(e => e.querySelectorAll('path').length)"
    lines = page.eval_on_selector_all(".lk-move .lk-block", count)
    assert [lines.count(k) for k in range(4)] == [16, 16, 16, 0]
    assert "each line: a further stage" in page.inner_text(".lk-key")
    assert "a line: a rank's second stage" in show(pipeline_player(interleaved(4, 2))).inner_text(".lk-key")


def test_a_hung_run_ends_where_it_hung(show: Callable) -> None:
    done = [Action(0, 0, 0, "F"), Action(0, 0, 1, "F"), Action(1, 1, 0, "F"), Action(1, 1, 0, "B")]
    hung = recorded(PipelineSchedule("mine", 2, 2, done))
    page = show(pipeline_player({"hung": hung, "deadlock": PipelineSchedule("mine", 2, 2, WRONG)}),
                reduced_motion="reduce")
    assert "Rank 0 is at the end of its order." in " ".join(captions(page))
    assert caption(page) == ("The order ends here and is not complete. Rank 0 stands after F1 of stage 0 with 2 in "
                             "flight. Rank 1 stands after B0 of stage 1.")
    page.get_by_label("run").select_option(label="deadlock")
    assert caption(page) == ("The order ends here and is not complete. Rank 0 waits at B0 of stage 0 for the backward "
                             "of micro-batch 0 on stage 1. Rank 1 waits at F1 of stage 1 for F1 of stage 0.")
    assert figures(page)["no bubble: the order is not complete"] == "–"


def test_ranks_keep_their_numbers(show: Callable) -> None:
    """One pipeline of two, on ranks 1 and 3."""
    events = [replace(event, rank=2 * event.rank + 1) for event in recorded(gpipe(2, 2)).of_kind("compute")]
    trace = Trace([*events, *recorded(gpipe(1, 1)).events], 4, "measured", "recorded")
    page = show(pipeline_player(trace, ranks=[1, 3]), reduced_motion="reduce")
    assert captions(page)[1] == "Ranks 1 and 3 start forwards of micro-batches 1 and 0."
    assert page.locator(".lk-rank").all_text_contents()[:2] == ["rank 1", "rank 3"]


def test_a_micro_batch_can_be_followed(show: Callable) -> None:
    page = show(pipeline_player(one_f_one_b(4, 8)), has_touch=True)
    assert page.inner_text(".lk-told").startswith("Tap a block")
    page.locator(".lk-block[data-b='2']").first.hover()
    times = [(e.op, e.start_s, e.end_s) for e in simulate_pipeline(PIPELINES["1F1B"], 1, 2).of_kind("compute")
             if e.micro_batch == 2]
    there, back = ([span for kind, *span in times if kind == wanted] for wanted in "FB")
    assert page.inner_text(".lk-told") == (
        f"Micro-batch 2: forward {there[0][0]:g} ms to {there[-1][1]:g} ms, backward {back[0][0]:g} ms to "
        f"{back[-1][1]:g} ms; kept longest by stage 0, for {back[-1][1] - there[0][1]:g} ms")
    assert page.locator(".lk-block.on").count() == 2 * 8
    assert page.locator(".lk-trail").get_attribute("d").count("M") == 7, "a line from each of its 8 actions to the next"
    page.mouse.move(2, 2)
    assert page.locator(".on").count() == 0
    press(page, "ArrowDown", "ArrowDown", "ArrowUp")
    assert page.inner_text(".lk-told").startswith("Micro-batch 0:") and state(page)["batch"] == "0"
    page.locator("svg:first-child > .lk-block[data-b='5']").last.tap()
    assert state(page)["batch"] == "5"


def test_another_run_keeps_the_clock(show: Callable) -> None:
    page = show(pipeline_player(PIPELINES, select="1F1B"), reduced_motion="reduce")
    press(page, *["ArrowRight"] * 4)
    assert "1F1B" in page.get_by_label("run").evaluate("s => s.selectedOptions[0].text")
    clock = page.locator(".lk-stage .lk-rank").last
    assert clock.text_content() == "4 ms"
    page.get_by_label("run").select_option(label="GPipe")
    assert clock.text_content() == "4 ms" and figures(page)["in flight at most, on each rank"] == "8"
    press(page, "End")
    page.get_by_label("run").select_option(label="interleaved")
    assert "Done after 57 ms." in caption(page)


def test_a_race_runs_on_one_clock(show: Callable) -> None:
    page = show(pipeline_race(PIPELINES), reduced_motion="reduce")
    assert page.locator(".lk-run span").all_inner_texts() == ["…"] * len(PIPELINES), "a reader guesses first"
    ends = re.findall(r"(\S+) is done after ([\d.]+) ms", " ".join(captions(page)))
    assert ends == [("ZB-V", "25.5"), ("interleaved", "28.5")]
    names = page.eval_on_selector_all(".lk-run", "all => all.map(e => [...e.children].map(x => x.textContent))")
    assert [name for name, _ in names] == list(PIPELINES)
    assert dict(names)["GPipe"] == "33 ms · bubble 27.3 % · at most 8 in flight"
    widths = page.eval_on_selector_all(".lk-stage svg:first-child > rect:first-of-type",
                                       "all => all.map(e => e.getBBox().width)")
    assert widths[0] == widths[1] > widths[2] > widths[3], "each is as wide as it is long"
    assert caption(page) == "GPipe and 1F1B are done after 33 ms."
    tallies = page.eval_on_selector_all(".lk-stage text", "all => all.map(e => e.textContent)")
    assert [text for text in tallies if text.startswith("0/")] == [
        f"0/{peak}" for schedule in PIPELINES.values() for peak in schedule.peak_in_flight()]


@pytest.mark.parametrize("width", first(390, 760))
def test_a_race_can_be_read(show: Callable, width: int) -> None:
    page = show(pipeline_race(PIPELINES), width=width, height=1500)
    for share in (0, 0.4, 1):
        scrub(page, share)
        assert_readable(page, f"race at {width} px, {share}")
    assert page.evaluate("document.documentElement.scrollWidth") <= width


# An action under way
def test_a_rank_that_works_is_not_idle(show: Callable) -> None:
    """After 5 ms rank 0 is half through its first backward, and has waited for it for 2 ms."""
    page = show(pipeline_player(one_f_one_b(2, 2)), reduced_motion="reduce")
    press(page, *["ArrowRight"] * 4)
    found = page.eval_on_selector_all("text", "all => all.map(e => e.textContent).filter(t => t.startsWith('idle'))")
    assert found == ["idle 2 ms", "idle 1 ms"]
