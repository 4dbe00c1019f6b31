"""The pipeline player: what a trace is written as, what is refused; and static pages of it in a real Chromium."""
from __future__ import annotations

import html
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from book.cost import Link, pipeline_bubble
from book.launch import launch
from book.pipelines import gpipe, interleaved, one_f_one_b, zero_bubble
from book.replay import bubble, replay_pipeline
from book.schedule import Action, PipelineSchedule
from book.simulate import simulate_pipeline
from book.trace import Event, Trace
from book.widgets import pipeline_player, pipeline_race
from tests.players import assert_readable, caption, captions, figures, first, html_of, press, scrub, state
from tests.test_record_memory import stages_of, train
from tests.widget_rows import PIPELINES, WRONG

MOST_PAGE_BYTES = 60_000
LINK = Link(400e-6, 1e9)



def data_of(shown: Any) -> dict[str, Any]:
    """The data in a player's HTML, as a browser would read the attribute."""
    return json.loads(html.unescape(re.match(r"<div data-lockstep-pipeline='([^']*)'>", html_of(shown))[1]))


def run_of(shown: Any) -> dict[str, Any]:
    [run] = data_of(shown)["runs"]
    return run


def recorded(schedule: PipelineSchedule, scale: float = 1.0, backend: str = "gloo") -> Trace:
    """A schedule as a launch would record it, where a machine took its time for each action."""
    modelled = simulate_pipeline(schedule, 0.013 * scale, 0.017 * scale)
    return Trace(modelled.events, modelled.world_size, "measured", "recorded", name="job", backend=backend)


def actions_in(run: dict[str, Any]) -> Iterator[tuple]:
    """(rank, stage, micro-batch, kind, start, end in ticks): the data read back."""
    for rank, own in enumerate(run["actions"]):
        for stage, kind, micro_batch, start, end, *_ in own:
            yield rank, stage, micro_batch, kind, start, end


def messages_in(run: dict[str, Any]) -> Iterator[tuple]:
    """(rank, stage, micro-batch, what, from, to in ticks) of what travels between ranks."""
    for rank, own in enumerate(run["actions"]):
        for stage, kind, micro_batch, _, _, *sent in own:
            if sent:
                yield rank, stage, micro_batch, "output" if kind == "F" else "gradient", *sent


def order_of(run: dict[str, Any]) -> list[str]:
    """The order of each rank, as PipelineSchedule.to_csv writes it."""
    return [",".join(f"{stage}{kind}{m}" for stage, kind, m, *_ in own) for own in run["actions"]]


@st.composite
def pipelines(draw: st.DrawFn) -> tuple[PipelineSchedule, Trace]:
    """One of the schedules with any durations, and its simulation."""
    num_ranks, groups = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    schedule = draw(st.sampled_from([gpipe(num_ranks, groups), one_f_one_b(num_ranks, 2 * groups),
                                     interleaved(2 * num_ranks, groups * num_ranks),
                                     zero_bubble(2 * num_ranks, 2 * groups)]))
    forward_s, backward_s = draw(st.floats(1e-4, 2)), draw(st.floats(1e-4, 2))
    link = draw(st.sampled_from([None, Link(1e-3, 1e9)]))
    slowdown = draw(st.dictionaries(st.integers(0, num_ranks - 1), st.floats(0.5, 3)))
    return schedule, simulate_pipeline(schedule, forward_s, backward_s, draw(st.floats(0, 1)) * backward_s, link,
                                       num_bytes=1e6, slowdown=slowdown)


@pytest.mark.slow
@settings(max_examples=80, deadline=None)
@given(pipelines())
def test_the_data_match_the_trace(drawn: tuple[PipelineSchedule, Trace]) -> None:
    schedule, trace = drawn
    run = run_of(pipeline_player(trace))
    found = {row[:4]: row[4:] for row in actions_in(run)}
    text = "\n".join([f"# own,{schedule.num_stages},{run['batches']}", *order_of(run)])
    assert PipelineSchedule.from_csv(text).actions == schedule.actions
    seconds = run["step_s"] / run["ticks"]
    for event in trace.of_kind("compute"):
        start, end = found.pop((event.rank, event.stage, event.micro_batch, event.op))
        assert (start * seconds, end * seconds) == pytest.approx((event.start_s, event.end_s), abs=2 * seconds)
    assert not found
    sent = {(e.rank, e.stage, e.micro_batch, e.op): (e.start_s, e.end_s) for e in trace.of_kind("send")}
    for *what, start, end in messages_in(run):
        assert (start * seconds, end * seconds) == pytest.approx(sent.pop(tuple(what)), abs=4 * seconds)
    assert not sent


@settings(max_examples=40, deadline=None)
@given(pipelines())
def test_figures_match_the_trace_and_the_schedule(drawn: tuple[PipelineSchedule, Trace]) -> None:
    schedule, trace = drawn
    (share, _), (_, _), (most, where), *_ = run_of(pipeline_player(trace))["figures"]
    assert share == f"{100 * bubble(trace).share:.1f} %"
    peaks = schedule.peak_in_flight()
    assert most == str(max(peaks))
    assert [int(peak) for peak in re.findall(r"\d+", where)] == (peaks if len(set(peaks)) > 1 else [])


def test_times_are_small_whole_numbers_of_ticks() -> None:
    run = run_of(pipeline_player(one_f_one_b(4, 8)))
    assert run["ticks"] == 33 and run["actions"][3][:3] == [[3, "F", 0, 3, 4], [3, "B", 0, 4, 6], [3, "F", 1, 6, 7]]


def test_the_formula_stands_where_it_holds() -> None:
    def first(shown: Any) -> tuple[str, str]:
        return tuple(run_of(shown)["figures"][0])

    assert first(pipeline_player(one_f_one_b(4, 8))) == ("27.3 %", "bubble: (p−1)/(m+p−1)")
    assert first(pipeline_player(interleaved(8, 8))) == ("15.8 %", "bubble: (p−1)/(vm+p−1)")
    assert first(pipeline_player(simulate_pipeline(one_f_one_b(4, 8), 1e-3, 2e-3, link=LINK, num_bytes=1e5)))[1] == (
        "bubble; (p−1)/(m+p−1) is 27.3 %, but here messages take time")
    late = simulate_pipeline(gpipe(4, 8), 1e-3, 2e-3, slowdown={2: 1.5})
    assert first(pipeline_player(late))[1].endswith("is 27.3 %, but here not all stages are equal")
    assert first(pipeline_player(zero_bubble(8, 8))) == ("5.9 %", "bubble: idle part of all ranks' time")
    more = run_of(pipeline_player(gpipe(4, 8)))["figures"][-1]
    assert more == [f"{100 * pipeline_bubble(4, 16):.1f} %", "bubble with 16 micro-batches"]


def test_a_schedule_is_known_by_its_order() -> None:
    same = PipelineSchedule("mine", 4, 8, one_f_one_b(4, 8).actions)
    assert data_of(pipeline_player(same))["title"] == "Pipeline: 1F1B, 4 stages, 8 micro-batches"
    swapped = same.to_csv().replace("0F0,0F1", "0F1,0F0", 1)
    other = PipelineSchedule.from_csv(swapped)
    assert data_of(pipeline_player(other))["title"] == "Pipeline: 4 stages, 8 micro-batches"
    assert len(run_of(pipeline_player(other))["figures"]) == 4
    assert data_of(pipeline_player([gpipe(2, 4), one_f_one_b(2, 4)]))["title"] == "Pipeline: 2 stages, 4 micro-batches"
    assert str(pipeline_player(gpipe(1, 1))) == (
        "Pipeline: GPipe, 1 stage, 1 micro-batch: pipeline player, 1 rank, 1 stage, 1 micro-batch, simulated · B = 2F")
    assert data_of(pipeline_player([gpipe(2, 4), gpipe(2, 8)]))["title"] == "Pipeline: GPipe"
    assert data_of(pipeline_player([gpipe(2, 4), one_f_one_b(2, 8)], title="Two"))["title"] == "Two"


def test_pages_are_the_same_on_every_machine() -> None:
    """Whatever a machine took, a recorded order has modelled times, on the page and in a live notebook."""
    slow, fast = recorded(one_f_one_b(4, 6)), recorded(one_f_one_b(4, 6), 1e-3, "nccl")
    assert html_of(pipeline_player(slow)) == html_of(pipeline_player(fast))
    run = run_of(pipeline_player(fast))
    assert run["source"] == "order recorded from 4 processes · durations modelled (B = 2F)"
    assert run["step_s"] == pytest.approx(9 * 3e-3)
    assert json.loads(pipeline_player(fast).payload)["runs"] == [run]
    assert run_of(pipeline_player(replay_pipeline(slow, 1e-3, 1e-3)))["source"] == (
        "order recorded from 4 processes · durations modelled")


def test_a_real_run_has_the_order_that_ran() -> None:
    schedule = one_f_one_b(2, 4)
    trace = launch(train, 2, "1F1B", stages_of(schedule), 2, 4, 2, record=True).trace
    run = run_of(pipeline_player(trace))
    assert run == {**run_of(pipeline_player(schedule)),
                   "source": "order recorded from 2 processes · durations modelled (B = 2F)"}


def test_a_part_of_the_ranks_is_shown_as_a_pipeline_of_its_own() -> None:
    twice = [replace(event, rank=event.rank + 2 * i) for i in range(2) for event in recorded(gpipe(2, 3)).events
             if event.kind == "compute"]
    trace = Trace(twice, 4, "measured", "recorded")
    shown = pipeline_player(trace, ranks=[2, 3])
    assert order_of(run_of(shown)) == gpipe(2, 3).to_csv().splitlines()[1:] and run_of(shown)["who"] == [2, 3]
    assert "<tr><th>rank 2</th><td>F0 F1 F2" in html_of(shown)
    assert run_of(pipeline_player(trace, ranks=[0, 1]))["who"] == [0, 1]


def test_a_deadlocked_order_is_shown_up_to_the_deadlock() -> None:
    run = run_of(pipeline_player(PipelineSchedule("mine", 2, 2, WRONG)))
    assert order_of(run) == ["0F0", "1F0"]
    assert run["ends"] == ["rank 0 waits at B0 of stage 0 for the backward of micro-batch 0 on stage 1",
                           "rank 1 waits at F1 of stage 1 for F1 of stage 0"]
    assert run["figures"][0] == ["–", "no bubble: the order is not complete"]


def test_a_hung_run_says_where_each_rank_waits() -> None:
    done = [Action(0, 0, 0, "F"), Action(0, 0, 1, "F"), Action(1, 1, 0, "F"), Action(1, 1, 0, "B")]
    hung = recorded(PipelineSchedule("mine", 2, 2, done, world_size=3))
    shown = pipeline_player(hung)
    assert run_of(shown)["ends"] == ["rank 0 stands after F1 of stage 0 with 2 in flight",
                                     "rank 1 stands after B0 of stage 1", "rank 2 has done nothing"]
    assert "<li>rank 2 has done nothing</li>" in html_of(shown)
    only_forward = [Action(rank, rank, m, "F") for rank in range(2) for m in range(2)]
    assert run_of(pipeline_player(PipelineSchedule("serve", 2, 2, only_forward)))["ends"]


def test_runs_are_chosen_by_their_keys() -> None:
    runs = {("GPipe", 4): gpipe(2, 4), ("1F1B", 4): one_f_one_b(2, 4), ("1F1B", 8): one_f_one_b(2, 8)}
    data = data_of(pipeline_player(runs, labels=["schedule", "micro-batches"], select=("1F1B", 8)))
    assert data["axes"] == [{"label": "schedule", "values": ["GPipe", "1F1B"]},
                            {"label": "micro-batches", "values": ["4", "8"]}]
    assert [run["at"] for run in data["runs"]] == [[1, 1], [0, 0], [1, 0]]


def test_a_race_splits_one_model() -> None:
    """Two stages on a rank have half the layers each, so half the time and half the activations."""
    runs = {"1F1B": one_f_one_b(4, 8), "interleaved": interleaved(8, 8)}
    one, other = data_of(pipeline_race(runs))["runs"]
    assert (one["step_s"], other["step_s"]) == (0.033, 0.0285)
    assert one["brief"] == "33 ms · bubble 27.3 % · at most 4 in flight"
    assert other["brief"] == "28.5 ms · bubble 15.8 % · at most 5.5 in flight (11 of 1/2 the size)"
    assert run_of(pipeline_player(runs["interleaved"]))["step_s"] == 0.057
    kept = data_of(pipeline_race({**runs, "given": simulate_pipeline(runs["interleaved"], 1e-3, 2e-3)}))["runs"][2]
    assert kept["step_s"] == 0.057, "a trace has times of its own"


@pytest.mark.parametrize("what, options, error, message", [
    (gpipe(9, 2), {}, ValueError, "up to 8 ranks and 2048 actions, and this pipeline has 9 ranks and 36 actions"),
    (one_f_one_b(8, 200), {}, ValueError, "3200 actions: take fewer ranks or micro-batches"),
    (simulate_pipeline(gpipe(2, 2), 0, 0), {}, ValueError, "takes no time: give forward_s or backward_s"),
    (Trace([Event(0, "send", peer=1)], 2, "logical", "recorded"), {}, ValueError, "no forwards and backwards"),
    (PipelineSchedule("none", 2, 2, []), {}, ValueError, "no actions: there is nothing to play"),
    ({}, {}, ValueError, "nothing to play"),
    ("gpipe", {}, TypeError, "takes a PipelineSchedule or a Trace of one, or a mapping of them, not str"),
    ({"a": gpipe(2, 2)}, {"select": "b"}, ValueError, "select can't be 'b': use one of a"),
])
def test_an_invalid_pipeline_is_refused(what: Any, options: dict, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        pipeline_player(what, **options)


def test_a_race_needs_runs_with_names() -> None:
    with pytest.raises(ValueError, match="two or more runs"):
        pipeline_race({"GPipe": gpipe(2, 2)})
    with pytest.raises(TypeError, match="needs names for its runs"):
        pipeline_race([gpipe(2, 2), one_f_one_b(2, 2)])


def test_a_reader_without_javascript_gets_the_figures_and_the_order() -> None:
    page = html_of(pipeline_player(one_f_one_b(2, 3), title="Mine"))
    assert "<li>25.0 %: bubble: (p−1)/(m+p−1)</li><li>12 ms: one step takes</li>" in page
    assert "<tr><th>rank 0</th><td>F0 F1 B0 F2 B1 B2</td></tr>" in page
    assert "<td>0F0 0F1 2F0" in html_of(pipeline_player(interleaved(4, 2))), "with two stages on a rank, which"
    runs = {"GPipe": gpipe(2, 3), "1F1B": one_f_one_b(2, 3)}
    assert html_of(pipeline_race(runs)).count("<ul>") == 2
    assert str(pipeline_race(runs)) == ("Pipelines on one clock: pipelines on one clock of 2 runs (GPipe, 1F1B), "
                                        "2 ranks, 2 stages, 3 micro-batches, simulated · B = 2F")
    assert "<table>" not in html_of(pipeline_player(gpipe(4, 32))), "long orders are for the picture"


def test_names_cannot_break_out_of_the_page() -> None:
    bad = """</div><script>alert('1')</script>"&amp;"""
    shown = pipeline_player({bad: gpipe(2, 2), "other": gpipe(2, 2)}, title=bad)
    assert "<script" not in html_of(shown)
    assert data_of(shown)["title"] == bad and data_of(shown)["axes"][0]["values"][0] == bad


def test_another_trace_can_be_set() -> None:
    player = pipeline_player(gpipe(2, 2))
    player.step = 3
    player.trace = recorded(one_f_one_b(4, 4))
    assert player.step == 0 and json.loads(player.payload)["runs"][0]["step_s"] == pytest.approx(7 * 3e-3)
    assert json.loads(player.payload)["title"] == "Pipeline: 1F1B, 4 stages, 4 micro-batches"


def test_sizes_keep_the_budget() -> None:
    runs = {"GPipe": gpipe(8, 16), "1F1B": one_f_one_b(8, 16), "interleaved": interleaved(16, 16),
            "ZB-V": zero_bubble(16, 16)}
    assert len(html_of(pipeline_race(runs)).encode()) <= MOST_PAGE_BYTES
    late = {name: simulate_pipeline(run, 1e-3, 2e-3, link=Link(3.3e-4, 1e9), num_bytes=12345)
            for name, run in runs.items() if name != "ZB-V"}
    assert len(html_of(pipeline_race(late)).encode()) <= MOST_PAGE_BYTES


def test_a_race_says_at_most_how_many_were_in_flight_so_far(show: Callable) -> None:
    page = show(pipeline_race({"GPipe": gpipe(2, 3), "1F1B": one_f_one_b(2, 3)}))
    tallies = page.locator(".lk-tiny", has_text="/")
    assert tallies.all_text_contents() == ["0/0"] * 4, "a reader guesses first"
    press(page, "End")
    assert tallies.all_text_contents() == ["0/3", "0/3", "0/2", "0/1"]


def test_a_micro_batch_that_is_followed_keeps_its_colours_and_others_fade(show: Callable) -> None:
    page = show(pipeline_race({"GPipe": gpipe(2, 3), "1F1B": one_f_one_b(2, 3)}))
    shown = "all => new Set(all.map(e => getComputedStyle(e).opacity)).size"
    assert page.eval_on_selector_all(".lk-move .lk-block", shown) == 1
    press(page, "ArrowDown")
    assert page.eval_on_selector_all(".lk-move .lk-block", shown) == 2
    assert page.eval_on_selector_all(".lk-move .lk-block.on", "all => all.map(e => getComputedStyle(e).opacity)") == [
        "1"] * 8


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


def test_words_of_neighbouring_blocks_do_not_touch_on_a_phone(show: Callable) -> None:
    page = show(pipeline_player(one_f_one_b(4, 16)), width=390)  # a backward is as wide as a digit there
    free = page.evaluate("""[...document.querySelectorAll('.lk-block:has(text)')].map(block =>
        block.querySelector('rect').getBBox().width - block.querySelector('text').getBBox().width)""")
    assert min(free, default=2) >= 1 and page.locator(".lk-block").count() > 100


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
