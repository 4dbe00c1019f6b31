"""The bucket timeline: what a followed backward pass is written as; it and the picture of calls in a real Chromium.

Pages are static, of their own HTML and assets, with the network blocked.
"""
from __future__ import annotations

import html
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from book.cost import Link
from book.launch import launch
from book.replay import Replay, overlap
from book.trace import Event, Trace
from book.widgets import bucket_timeline
from book.widgets.calls import Calls
from book.widgets.timeline import TICKS, read_backward
from tests.backward import layers, recorded
from tests.players import caption, captions, figures, html_of, press, scrub, state, until
from tests.test_backward import follow_ddp
from tests.test_look import made_up
from tests.widget_rows import LATE, REPLAY, SMALL, caps

MOST_PAGE_BYTES = 60_000


def data_of(shown: Any) -> dict[str, Any]:
    """The data in a timeline's HTML, as a browser would read the attribute."""
    return json.loads(html.unescape(re.match(r"<div data-lockstep-timeline='([^']*)'>", html_of(shown))[1]))


def run_of(trace: Trace, replay: Replay = REPLAY) -> tuple[dict[str, Any], dict[str, Any]]:
    """A timeline's data, and its one run."""
    data = data_of(bucket_timeline(trace, replay))
    return data, data["runs"][0]


def gradients_in(data: dict[str, Any], run: dict[str, Any]) -> Iterator[tuple]:
    """(rank, name, bytes, bucket or None, start, end in ticks): the ranks' gradients read back."""
    for rank, program in enumerate(run["ranks"]):
        for name, bucket, start, end in program["gradients"]:
            number = run["buckets"][bucket]
            yield rank, data["names"][name], data["sizes"][name], None if number < 0 else number, start, end


def flights_in(run: dict[str, Any]) -> Iterator[tuple]:
    """(rank, bytes, bucket or None, start, end in ticks) of each all-reduce on each of its ranks."""
    for flight in run["flights"]:
        number = run["buckets"][flight["bucket"]]
        for rank in flight["ranks"]:
            yield rank, flight["bytes"], None if number < 0 else number, flight["start"], flight["end"]


def ticks_of(trace: Trace, kind: str) -> list[tuple]:
    """What a trace says of all events of a kind, with times in ticks of its duration."""
    events = trace.of_kind(kind)
    start_s = min(event.start_s for event in trace.events)
    found = []
    for e in events:
        span = [round((time_s - start_s) / trace.duration_s * TICKS) for time_s in (e.start_s, e.end_s)]
        found.append((e.rank, *([e.op] if kind == "compute" else []), e.num_bytes, e.bucket, *span))
    return found


def in_order(rows: Any) -> list[tuple]:
    return sorted(rows, key=repr)


@st.composite
def passes(draw: st.DrawFn) -> tuple[Trace, Replay]:
    """A recorded backward pass of any buckets, and a replay of it."""
    sizes = st.lists(st.lists(st.integers(1, 4_000_000), min_size=1, max_size=4), min_size=1, max_size=6)
    counter = iter(range(100))
    buckets: dict[int | None, list[tuple[str, int]]] = {
        number: [(f"p{next(counter)}", size) for size in own] for number, own in enumerate(draw(sizes))}
    if draw(st.booleans()):
        buckets[None] = [("unsent", draw(st.integers(1, 1000)))]
    world_size = draw(st.integers(1, 4))
    slowdown = draw(st.dictionaries(st.integers(0, world_size - 1), st.floats(0.5, 3)))
    link = Link(draw(st.floats(0, 1e-3)), draw(st.floats(1e8, 1e11)))
    trace = recorded(buckets, world_size, at_the_end=draw(st.booleans()))
    return trace, Replay(draw(st.floats(1e-10, 1e-8)), link, slowdown)


@pytest.mark.slow
@settings(max_examples=80, deadline=None)
@given(passes())
def test_the_data_match_the_replayed_trace(drawn: tuple[Trace, Replay]) -> None:
    trace, replay = drawn
    modelled = replay(trace)
    data, run = run_of(trace, replay)
    assert in_order(gradients_in(data, run)) == in_order(ticks_of(modelled, "compute"))
    assert in_order(flights_in(run)) == in_order(ticks_of(modelled, "collective"))
    assert run["duration_s"] == pytest.approx(modelled.duration_s, rel=1e-5)
    found = {name: value for name, value in run["overlap"].items() if name != "even"}
    assert found == pytest.approx(asdict(overlap(modelled)), rel=1e-5, abs=1e-15)


@settings(max_examples=80, deadline=None)
@given(passes())
def test_what_is_exposed_adds_up_to_the_figure(drawn: tuple[Trace, Replay]) -> None:
    trace, replay = drawn
    modelled = replay(trace)
    run, found = read_backward(modelled), overlap(modelled)
    spans = [run.exposed(rank) for rank in range(run.world_size)]
    sums_s = [run.seconds(sum(end - start for start, end in own)) for own in spans]
    rounding_s = run.seconds(2 + 2 * sum(map(len, spans)))
    assert any(abs(sum_s - found.exposed_s) <= rounding_s for sum_s in sums_s)
    for own in spans:
        assert all(start < end for start, end in own)
        assert all(before[1] < after[0] for before, after in pairwise(own))


def test_ranks_that_differ_are_distinguished_from_those_that_agree() -> None:
    trace = recorded(layers(4), 8)
    assert run_of(trace)[1]["overlap"]["even"] is True
    assert run_of(trace, replace(REPLAY, slowdown={5: 2.0}))[1]["overlap"]["even"] is False


def one_after_the_other(*buckets: dict[int | None, list[tuple[str, int]]]) -> Trace:
    """Several backward passes in one trace."""
    events = [replace(event, start_s=event.start_s + 20 * i, end_s=event.end_s + 20 * i)
              for i, own in enumerate(buckets) for event in recorded(own).events]
    return Trace(events, 2, "measured", "recorded")


def test_a_second_pass_fills_buckets_again() -> None:
    """Gradients are accumulated in a pass without an all-reduce, then sent after another."""
    kept, sent = {None: [("b", 100), ("a", 200)]}, {0: [("b", 100)], 1: [("a", 200)]}
    data, run = run_of(one_after_the_other(kept, sent))
    assert run["buckets"] == [-1, 0, 1] and data["names"] == ["b", "a"]
    assert [row[3] for row in gradients_in(data, run) if row[0] == 0] == [None, None, 0, 1]
    _, run = run_of(one_after_the_other({0: [("a", 8)]}, {0: [("a", 8)]}))
    assert run["buckets"] == [0, 0] and [flight["bucket"] for flight in run["flights"]] == [0, 1]


def test_an_all_reduce_of_unknown_contents_stays_unknown() -> None:
    events = [replace(e, bucket=None) for e in recorded(layers(2)).events]
    data, run = run_of(Trace(events, 2, "measured", "recorded"))
    assert run["buckets"] == [-1] and len(run["flights"]) == 1
    assert all(row[3] is None for row in gradients_in(data, run))


def test_runs_are_chosen_by_their_keys() -> None:
    runs = {0.1: recorded(layers(4, 1)), 25: recorded(layers(4, 4))}
    data = data_of(bucket_timeline(runs, REPLAY, select=25, labels=["bucket_cap_mb"]))
    assert data["axes"] == [{"label": "bucket_cap_mb", "values": ["0.1", "25"]}]
    assert [(run["at"], len(run["buckets"])) for run in data["runs"]] == [([1], 1), ([0], 4)]
    assert len(data["names"]) == 8, "the parameters are written once for all runs"
    named = data_of(bucket_timeline({"mine": runs[0.1], "DDP": runs[25]}, REPLAY))
    assert named["axes"][0] == {"label": "run", "values": ["mine", "DDP"]}
    for keys in ((0.1, 25), (2, 4), (False, True)):
        unnamed = data_of(bucket_timeline(dict(zip(keys, runs.values())), REPLAY))
        assert unnamed["axes"][0]["label"] == "run", "what a number counts is for the caller to say"


def test_replays_may_stand_beside_recorded_runs() -> None:
    trace = recorded(layers(4))
    slow = replace(REPLAY, slowdown={1: 2.0})
    mixed = data_of(bucket_timeline({"even": trace, "rank 1 is slow": slow(trace)}, REPLAY))
    assert mixed["runs"][1]["duration_s"] > mixed["runs"][0]["duration_s"]
    alone = bucket_timeline(slow(trace))
    assert data_of(alone)["runs"][0]["duration_s"] == mixed["runs"][1]["duration_s"]


def test_pages_are_the_same_on_every_machine() -> None:
    """Whatever was measured, and wherever, the HTML has the modelled times; a live notebook has the measured ones."""
    slow, fast = recorded(layers(4), scale=0.31), recorded(layers(4), scale=0.0007, backend="nccl")
    assert html_of(bucket_timeline(slow, REPLAY)) == html_of(bucket_timeline(fast, REPLAY))
    _, run = run_of(fast)
    assert run["source"] == "order recorded from 2 processes · durations modelled"
    assert run["duration_s"] == pytest.approx(REPLAY(fast).duration_s)
    on_gloo, on_gpus = (json.loads(bucket_timeline(trace, REPLAY).payload)["runs"][0] for trace in (slow, fast))
    assert on_gloo["source"] == "order recorded from 2 processes on gloo · durations modelled"
    assert on_gloo["duration_s"] == run["duration_s"]
    assert on_gpus["source"] == "recorded from 2 processes on nccl · durations measured"
    assert on_gpus["duration_s"] == pytest.approx(fast.duration_s)
    assert on_gpus["overlap"]["step_s"] == pytest.approx(overlap(fast).step_s, rel=1e-5)


def test_a_run_that_hung_on_gpus_is_replayed_as_if_it_had_finished() -> None:
    trace = recorded(layers(4), backend="nccl")
    last = max(i for i, event in enumerate(trace.events) if event.kind == "collective")
    events = [replace(e, end_s=None) if i == last else e for i, e in enumerate(trace.events)]
    hung = Trace(events, 2, "measured", "recorded", backend="nccl")
    live = json.loads(bucket_timeline(hung, REPLAY).payload)["runs"][0]
    assert live["source"] == "order recorded from 2 processes on nccl · durations modelled"
    assert live["duration_s"] == pytest.approx(REPLAY(trace).duration_s)


def test_one_rank_has_no_hidden_share() -> None:
    page = html_of(bucket_timeline(recorded(layers(4), 1), REPLAY))
    assert "<td>none</td><td>–</td><td>–</td>" in page


def test_a_real_run_has_the_same_page_each_time() -> None:
    pages = [html_of(bucket_timeline(launch(follow_ddp, 2, (64,) * 5, {"bucket_cap_mb": 0.02}, record=True).trace,
                                     REPLAY)) for _ in range(2)]
    assert pages[0] == pages[1]
    data = json.loads(html.unescape(pages[0].split("'")[1]))
    [run] = data["runs"]
    assert run["buckets"] == [0, 1] and data["names"][:2] == ["3.bias", "3.weight"]
    assert [flight["bytes"] for flight in run["flights"]] == [2 * 65 * 64 * 4] * 2


@pytest.mark.parametrize("runs, replay, error, message", [
    (recorded(layers(2), 16), REPLAY, ValueError, "up to 8 ranks, and this trace has 16"),
    (recorded(layers(2)), None, ValueError, r"needs a replay, Replay\(backward_s_per_byte, link\)"),
    (recorded(layers(2), backend="nccl"), None, ValueError, "needs a replay"),
    (recorded(layers(2)).logical(), REPLAY, ValueError, "logical clock: replay the trace that was recorded"),
    (Trace([Event(0, "send", peer=1, start_s=0, end_s=1)], 2, "measured", "recorded"), REPLAY, ValueError,
     "follows no backward pass: call backward inside"),
    (recorded(layers(2)), Replay(0, Link(0, float("inf"))), ValueError, "takes no time: give backward_s_per_byte"),
    (recorded({0: [(f"p{i}", 4) for i in range(401)]}), REPLAY, ValueError, "up to 400 gradients a rank, and .* 401"),
    ({}, REPLAY, ValueError, "nothing to play"),
    ([1, 2], REPLAY, TypeError, "takes a recorded Trace .* not list"),
    ({"a": "b"}, REPLAY, TypeError, "not str"),
])
def test_runs_without_a_backward_pass_are_refused(runs: Any, replay: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        bucket_timeline(runs, replay)


def test_choices_that_do_not_exist_are_refused() -> None:
    runs = {0.1: recorded(layers(2)), 25: recorded(layers(2))}
    with pytest.raises(ValueError, match="select can't be 3: use one of 0.1, 25"):
        bucket_timeline(runs, REPLAY, select=3)
    with pytest.raises(ValueError, match="two keys of the runs to choose from read '25': give keys"):
        bucket_timeline({25: runs[25], "25": runs[25]}, REPLAY)
    with pytest.raises(ValueError, match="labels names each part of a key: give 1 of them"):
        bucket_timeline(runs, REPLAY, labels=["a", "b"])


def test_a_reader_without_javascript_gets_the_figures_and_the_buckets() -> None:
    runs = {cap: recorded(layers(4, per_bucket)) for cap, per_bucket in ((0.5, 2), (25, 4))}
    page = html_of(bucket_timeline(runs, REPLAY, title="DDP"))
    assert page.count("<table>") == 2
    assert "<td>0.5</td><td>2</td><td>2.83 ms</td><td>1.45 ms</td><td>0.726 ms (50%)</td><td>0.726 ms</td>" in page
    assert "<td>layers.3.bias (1,024 B), layers.3.weight (262,144 B), layers.2.bias" in page
    assert "<td>1.05 ms</td><td>1.05 ms to 1.78 ms</td>" in page
    assert str(bucket_timeline(runs, REPLAY, title="DDP")) == (
        "DDP: bucket timeline of 2 runs (0.5, 25), 2 ranks, order recorded, durations modelled")


def test_long_tables_are_shortened() -> None:
    many = html_of(bucket_timeline(recorded(layers(30, 1)), REPLAY))
    assert many.count("<table>") == 1
    assert " and 48 more</td>" in html_of(bucket_timeline(recorded(layers(30, 30)), REPLAY))


def test_names_cannot_break_out_of_the_page() -> None:
    bad = """</div><script>alert('1')</script>"&amp;"""
    shown = bucket_timeline({bad: recorded({0: [(bad, 8)]}), "other": recorded({0: [(bad, 8)]})}, REPLAY, title=bad)
    assert "<script" not in html_of(shown)
    data = data_of(shown)
    assert data["title"] == bad and data["names"] == [bad] and data["axes"][0]["values"][0] == bad


def test_another_trace_can_be_set() -> None:
    timeline = bucket_timeline(recorded(layers(2)), REPLAY)
    timeline.step = 3
    timeline.trace = recorded(layers(6))
    assert timeline.step == 0 and len(json.loads(timeline.payload)["names"]) == 12


def test_sizes_keep_the_budget() -> None:
    gpt = {i: [(f"blocks.{i}.mlp.{j}.{kind}", 4_000 * (j + 1)) for j in range(3) for kind in ("bias", "weight")]
           for i in range(8)}
    each = {i: [gradient] for i, gradient in enumerate(gradient for own in gpt.values() for gradient in own)}
    uneven = replace(REPLAY, slowdown={rank: 1 + rank / 7 for rank in range(8)})
    runs = {cap: recorded(buckets, 8) for cap, buckets in enumerate((gpt, each, gpt, each, gpt))}
    assert len(html_of(bucket_timeline(runs, uneven)).encode()) <= MOST_PAGE_BYTES


CONTAINER = ".lk-bucket[data-rank='{}'][data-b='{}']"


def clock(page: Any) -> str:
    """The time that is written below the lanes."""
    return page.locator(".lk-stage .lk-rank").last.text_content()


def bucket(page: Any, rank: int, index: int) -> tuple[str, str]:
    """How a bucket looks, and what it says of itself."""
    g = page.locator(CONTAINER.format(rank, index))
    return g.get_attribute("class"), g.get_attribute("aria-label")


def test_each_stop_is_described(show: Callable) -> None:
    page = show(bucket_timeline(recorded(SMALL), REPLAY), reduced_motion="reduce")
    assert captions(page) == [
        "Backward begins at the last layer. On each rank 3 gradients, 200 kB, go into 2 buckets.",
        "Both ranks: the gradient of head.bias is ready; bucket 0 has 400 B of 100 kB.",
        "Both ranks: the gradient of head.weight is ready; bucket 0 is full: 100 kB. Its all-reduce starts while "
        "backward goes on.",
        "Both ranks: the gradient of body.weight is ready; bucket 1 is full: 100 kB. It waits: bucket 0 is on the "
        "network. Backward is over.",
        "Bucket 0 is averaged on both ranks. The all-reduce of bucket 1 starts.",
        "Bucket 1 is averaged on both ranks. Done after 800 µs: 33 % of the communication was hidden."]
    assert figures(page) == {"step: backward and all-reduces": "800 µs", "of all-reduces": "600 µs",
                             "of them hidden behind backward": "33 %", "exposed, nothing hides it": "400 µs",
                             "buckets, 200 kB on each rank": "2"}


def test_a_reader_who_guesses_sees_all_reduces_and_figures_once_they_are_played(show: Callable) -> None:
    page = show(bucket_timeline(recorded(SMALL), REPLAY, guess=True), reduced_motion="reduce")
    told, at_rest = figures(page), page.locator("svg:not(.lk-move) .lk-block", has_text="bucket")
    assert {told["of all-reduces"], told["of them hidden behind backward"]} == {"?"} and at_rest.count() == 0
    assert page.locator(".lk-move .lk-block", has_text="bucket").count() == 2 * 2
    press(page, "End")
    assert figures(page)["of them hidden behind backward"] == "33 %"


def test_a_late_rank_is_waited_for(show: Callable) -> None:
    page = show(bucket_timeline(recorded(SMALL), LATE), reduced_motion="reduce")
    said = captions(page)
    assert ("Rank 0: the gradient of head.weight is ready; bucket 0 is full: 100 kB. It waits for rank 1, which is "
            "late.") in said
    assert ("Rank 0: the gradient of body.weight is ready; bucket 1 is full: 100 kB. It waits for rank 1, which is "
            "late. Rank 1: head.weight; bucket 0 is full: 100 kB. Its all-reduce starts while backward goes on. "
            "Backward is over on rank 0.") in said, "two gradients at one moment are both told"
    assert "exposed on the slowest rank" in figures(page)


def test_one_bucket_is_told_in_the_singular(show: Callable) -> None:
    page = show(bucket_timeline(recorded({0: SMALL[0]}), REPLAY))
    assert figures(page)["bucket, 100 kB on each rank"] == "1"


def test_gradients_sent_after_backward_and_never_sent(show: Callable) -> None:
    runs = {"late": recorded(SMALL, at_the_end=True), "kept": recorded({None: SMALL[0]})}
    page = show(bucket_timeline(runs, REPLAY), reduced_motion="reduce")
    said = captions(page)
    assert "Both ranks: the gradient of head.weight is ready; bucket 0 is full: 100 kB. It is sent later." in said
    page.get_by_label("run").select_option(label="kept")
    assert captions(page)[-1] == ("Both ranks: the gradient of head.weight is ready; no all-reduce takes it. Backward "
                                  "is over. Done after 200 µs.")
    assert figures(page)["of all-reduces"] == "–"
    assert bucket(page, 0, 0) == ("lk-bucket not sent", "no bucket of rank 0: 100 kB, not sent")


def test_one_rank_has_nothing_to_hide(show: Callable) -> None:
    page = show(bucket_timeline(recorded(SMALL, 1), REPLAY), reduced_motion="reduce")
    assert captions(page)[-1].endswith("Done after 400 µs.")
    assert figures(page) == {"step: backward and all-reduces": "400 µs", "of all-reduces": "–",
                             "of them hidden behind backward": "–", "exposed, nothing hides it": "–",
                             "buckets, 200 kB on each rank": "2"}


def test_buckets_fill_wait_travel_and_are_averaged(show: Callable) -> None:
    page = show(bucket_timeline(recorded(SMALL), LATE), reduced_motion="reduce")
    seen: dict[int, list[tuple[str, str]]] = {0: [], 1: []}
    for _ in range(int(state(page)["steps"]) + 1):
        for rank, found in seen.items():
            now = bucket(page, rank, 0)
            found.extend([now] if now not in found else [])
        press(page, "ArrowRight")
    told = [(name.removeprefix("lk-bucket "), label.removeprefix("bucket 0 of rank 0: ")) for name, label in seen[0]]
    assert told == [("filling", "0 B of 100 kB"), ("filling", "400 B of 100 kB"), ("waits", "100 kB, waits"),
                    ("flying", "100 kB, flying"), ("averaged", "100 kB, averaged")]
    assert [name for name, _ in seen[1]] == ["lk-bucket filling"] * 2 + ["lk-bucket flying", "lk-bucket averaged"]
    assert page.locator(f"{CONTAINER.format(0, 0)} .lk-fill.in").count() == 2
    widths = page.eval_on_selector_all(f"{CONTAINER.format(0, 0)} .lk-fill", "all => all.map(e => e.getBBox().width)")
    assert widths[0] < widths[1] / 20, "segments are as wide as their gradients are large"


def test_scrubbing_moves_the_clock_and_what_it_passed(show: Callable) -> None:
    page = show(bucket_timeline(recorded(SMALL), REPLAY))
    hidden_right = "parseFloat(document.querySelector('.lk-move').style.clipPath.split(' ')[1])"
    before = page.evaluate(hidden_right)
    scrub(page, 0.55)
    assert clock(page) == "440 µs", "where it was let go, not at a stop"
    assert state(page)["step"] == "3" and page.evaluate(hidden_right) < before - 100
    assert page.get_by_role("slider").get_attribute("aria-valuetext") == "440 µs of 800 µs"


def detail(page: Any) -> str:
    return page.inner_text(".lk-detail").replace("\n", " ")


def test_a_bucket_lists_its_parameters(show: Callable) -> None:
    page = show(bucket_timeline(recorded(SMALL), REPLAY))
    assert detail(page).startswith("0 Bucket 0: 100 kB, full after 200 µs, all-reduced from 200 µs to 500 µs")
    assert page.locator(".lk-detail li").all_inner_texts() == ["head.bias 400 B", "head.weight 99.6 kB"]
    page.locator(CONTAINER.format(1, 1)).hover()
    assert detail(page).startswith("1 Bucket 1: ")
    assert page.locator(".lk-detail li").inner_text() == "body.weight 100 kB"
    assert page.locator(".lk-bucket.on").count() == 2 and page.locator(".lk-block.on").count() == 2 * 2 * 2
    page.mouse.move(2, 2)
    assert detail(page).startswith("0 Bucket 0") and page.locator(".on").count() == 0
    press(page, "End")
    assert detail(page).startswith("1 Bucket 1"), "without a pointer it is the one under way"


def test_buckets_by_keyboard_and_by_touch(show: Callable) -> None:
    page = show(bucket_timeline(recorded(layers(4, 1)), REPLAY), has_touch=True)
    press(page, "ArrowDown", "ArrowDown", "ArrowDown")
    assert detail(page).startswith("2 Bucket 2") and page.evaluate("document.activeElement.dataset.b") == "2"
    page.keyboard.press("ArrowUp")
    assert detail(page).startswith("1 Bucket 1")
    page.keyboard.press("ArrowRight")
    until(page, step=1)
    assert page.locator(".lk-stage [tabindex='0']").count() == 1, "one stop for the Tab key"
    page.locator(CONTAINER.format(1, 3)).tap()
    assert detail(page).startswith("3 Bucket 3")


def test_the_clock_continues_in_another_run(show: Callable) -> None:
    page = show(bucket_timeline(caps(), REPLAY, select=0.5, labels=["bucket_cap_mb"]), reduced_motion="reduce")
    select = page.get_by_label("bucket_cap_mb")
    assert select.evaluate("s => s.selectedOptions[0].text") == "0.5"
    press(page, *["ArrowRight"] * 4)
    now = clock(page)
    select.select_option(label="25")
    assert page.locator(".lk-bucket").count() == 2 and figures(page)["of them hidden behind backward"] == "0 %"
    assert clock(page) == now
    press(page, "End")
    select.select_option(label="0.1")
    assert "Done after" in caption(page) and page.locator(".lk-bucket").count() == 16
    widths = {}
    for label in ("0.5", "25"):
        select.select_option(label=label)
        widths[label] = page.evaluate("document.querySelector('.lk-stage svg > rect').getBBox().width")
    assert widths["0.5"] < widths["25"], "all runs are drawn on one clock"


@pytest.mark.parametrize("options", [{"color_scheme": "dark", "width": 390}, {}])
def test_calls_open_at_their_end_and_are_told_one_by_one(show: Callable, options: dict[str, Any]) -> None:
    page = show(Calls(made_up(4, 2, "backward", num_steps=9), end="rank 2 is late"), reduced_motion="reduce", **options)
    assert caption(page) == "Rank 2 is late" and state(page)["step"] == state(page)["steps"] == "9"
    assert captions(page)[1:9] == [
        "Rank 2 comes last, 20 ms after the one before it and 20 ms after the first."] * 8
    assert page.locator(".lk-key span").all_inner_texts() == [
        "\u00a0input", "\u00a0forward", "\u00a0backward", "\u00a0optimizer", "\u00a0other code", "\u00a0exchange",
        "\u00a0waits for others"]
    assert page.locator(".lk-rank").all_text_contents() == [f"rank {rank}" for rank in range(4)]
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


# A program that sends one bucket in two parts
def in_two_parts() -> Trace:
    """Two gradients in one bucket, which two all-reduces of half its bytes carry, one after the other."""
    whole = recorded({0: [("a", 4000), ("b", 4000)]})
    parts = [replace(event, num_bytes=4000.0, start_s=event.start_s + later, end_s=event.end_s + later)
             for event in whole.events if event.kind == "collective" for later in (0.0, 5.0)]
    return Trace([*(event for event in whole.events if event.kind == "compute"), *parts], 2, "measured", "recorded")


def test_a_bucket_is_averaged_when_its_last_part_is(show: Callable) -> None:
    page = show(bucket_timeline(in_two_parts(), REPLAY), reduced_motion="reduce")
    seen = []
    for _ in range(int(state(page)["steps"]) + 1):
        seen.append(page.locator(".lk-bucket[data-rank='0'][data-b='0']").get_attribute("class").split()[1])
        press(page, "ArrowRight")
    assert seen == ["filling", "filling", "flying", "flying", "averaged"]
