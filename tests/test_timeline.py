"""The bucket timeline's Python side: what a followed backward pass is written as, and what stands on a page."""
from __future__ import annotations

import html
import json
import re
from collections.abc import Iterator
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
from book.widgets.timeline import TICKS, read_backward
from tests.backward import layers, recorded
from tests.players import html_of
from tests.test_backward import follow_ddp

REPLAY = Replay(2e-9, Link(100e-6, 1e9))
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
