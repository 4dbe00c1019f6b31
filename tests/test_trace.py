"""Traces: what they hold, in files and in tables; damaged ones; faults put into them on purpose."""
from __future__ import annotations

import copy
import json
import math
import random
from dataclasses import replace

import pytest

from book import collectives
from book.collectives import ring_all_reduce, tree_all_reduce
from book.cost import Link
from book.faults import Job, daly, expected_goodput, run, young
from book.simulate import simulate
from book.trace import Event, Trace, TraceError
from book.trace_schema import CellLine
from book.widgets import play


LINK = Link(1e-5, 1e9)


def ring(world_size=4, **kwargs):
    return simulate(collectives.ring_all_reduce(world_size), 1e6, LINK, **kwargs)


def test_json_round_trip():
    events = [Event(0, "hold", chunk=0, step=0, contributions=(1, 0)), Event(1, "hold", chunk=0, step=0),
              Event(0, "send", peer=1, chunk=0, step=0, num_bytes=2.5, start_s=0.0, end_s=1.5, contributions=(1, 0.5),
                    line=CellLine(6, "step", "dist.send(x, 1)  # in step: 2")),
              Event(1, "collective", op="all_reduce", group=(0, 1), num_bytes=8, start_s=2.0),
              Event(1, "collective", op="all_to_all", group=(0, 1), num_bytes=8, parts=(2, 6), start_s=3.0)]
    trace = Trace(events, 2, "measured", "recorded", backend="gloo")
    assert trace.renumbered([1, 0]).events[-1] == replace(events[-1], rank=0, parts=(6, 2))
    assert list(trace.events) == events
    assert Trace.from_json(trace.to_json()) == trace
    assert Trace.from_json(ring().to_json()) == ring()
    older = trace.to_json().replace('[6,"step","dist.send', '"6 in step: dist.send').replace('step: 2"]', 'step: 2"')
    assert older != trace.to_json() and Trace.from_json(older) == trace
    with pytest.raises(TraceError, match="must be the number of a line, its function and its source"):
        Trace.from_json(trace.to_json().replace('[6,"step"', '[-6,"step"'))


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"format": "lockstep trace 9"}', '{"format":"lockstep trace 1"}'])
def test_something_else_is_not_a_trace(text):
    with pytest.raises(TraceError, match="not a trace's JSON"):
        Trace.from_json(text)


def test_logical_drops_times_and_the_order_of_arrival():
    trace = ring()
    events = list(trace.events)
    random.Random(5).shuffle(events)
    shuffled = Trace(events, 4, "modelled", "simulated", name=trace.name, promise=trace.promise)
    assert shuffled.logical() == trace.logical() == ring(slowdown={2: 9.0}).logical()
    assert trace.logical().duration_s is None and trace.logical().clock == "logical"


def test_logical_of_another_program_differs():
    other = simulate(collectives.tree_all_reduce(4), 1e6, LINK)
    assert other.logical() != ring().logical()


@pytest.mark.parametrize("arguments", [("sundial", "simulated"), ("measured", "invented")])
def test_an_invalid_clock_or_source_is_refused(arguments):
    with pytest.raises(TraceError, match="must be one of"):
        Trace([], 1, *arguments)


def test_an_empty_trace_has_no_steps_and_no_duration():
    trace = Trace([], 2, "measured", "recorded")
    assert (trace.num_steps, trace.num_chunks, trace.duration_s, trace.held()) == (0, 0, None, {})
    assert trace.sent_bytes().tolist() == [0, 0] and len(trace.logical().events) == 0


def test_collectives_count_by_the_factor_of_a_frugal_algorithm_and_messages_as_they_are():
    everyone = (0, 1, 2, 3)
    calls = [("all_reduce", everyone, 80), ("all_gather", (1, 2), 60), ("broadcast", everyone, 7),
             ("barrier", everyone, 0)]
    events = [Event(rank, "collective", op, group=group, num_bytes=size) for op, group, size in calls for rank in group]
    events += [Event(0, "send", peer=1, num_bytes=5), Event(1, "recv", peer=0, num_bytes=5),
               Event(3, "collective", "all_to_all", group=everyone, num_bytes=100, parts=(10, 20, 30, 40))]
    trace = Trace(events, 4, "logical", "recorded")
    assert trace.sent_bytes().tolist() == [2 * 3 / 4 * 80 + 7 + 5, 120 + 30 + 7, 120 + 30 + 7, 120 + 7 + 60]
    assert trace.message_bytes().tolist() == [5, 0, 0, 0]
    with pytest.raises(TraceError, match="how much a rank sends in gossip is not known"):
        Trace([Event(0, "collective", "gossip", group=everyone)], 4, "logical", "recorded").sent_bytes()


@pytest.mark.parametrize("event, complaint", [
    (Event(0, "snd"), "kind must be one of"), (Event(2, "send"), "has rank 2: ranks are 0 to 1"),
    (Event(0, "send", peer=5), "has peer 5"), (Event(0.5, "send"), "rank must be a whole number"),
    (Event(0, "hold", contributions=()), "same number of entries")])
def test_an_invalid_event_is_refused(event, complaint):
    with pytest.raises(TraceError, match=complaint):
        Trace([event], 2, "measured", "recorded")


def test_contributions_of_different_length_are_refused():
    with pytest.raises(TraceError, match="same number of entries"):
        Trace([Event(0, "hold", contributions=(1, 0)), Event(1, "hold", contributions=(1,))], 2, "measured", "recorded")


@pytest.mark.parametrize("world_size", [0, "2", True, 1.5])
def test_an_invalid_world_size_is_refused(world_size):
    with pytest.raises(TraceError, match="world_size must be a whole number"):
        Trace([], world_size, "measured", "recorded")


def test_a_bucket_goes_with_its_gradients_and_its_all_reduce():
    events = [Event(0, "compute", "2.weight", step=0, num_bytes=8, start_s=0.0, end_s=1.0, bucket=0),
              Event(0, "compute", "0.weight", step=0, num_bytes=8, start_s=1.0, end_s=2.0),
              Event(0, "collective", "all_reduce", step=0, num_bytes=8, start_s=1.0, end_s=3.0, bucket=0)]
    trace = Trace(events, 1, "measured", "recorded")
    assert Trace.from_json(trace.to_json()) == trace
    assert [event.bucket for event in trace.logical().events] == [0, 0, None]
    with pytest.raises(TraceError, match="bucket must be a whole number"):
        Trace([Event(0, "compute", bucket=0.5)], 1, "measured", "recorded")


def test_columns_of_different_length_are_not_a_trace():
    text = ring().to_json().replace('"rank":[0,', '"rank":[')
    with pytest.raises(TraceError, match="not a trace's JSON"):
        Trace.from_json(text)


def test_a_hang_has_no_duration_but_a_timeline():
    """The reader's case: nothing completed, so no event has an end."""
    waiting = Trace([Event(r, "recv", peer=1 - r, step=0, start_s=0.1 * r) for r in (0, 1)], 2, "measured", "recorded")
    assert waiting.duration_s is None
    assert waiting.logical().num_steps == 1


MODELLED = json.loads(simulate(ring_all_reduce(4), 1e6, LINK).to_json())
LOGICAL = json.loads(simulate(tree_all_reduce(4), 1e6, LINK).logical().to_json())
VALUES = [None, True, -1, 0, 3, 7, 10**9, 10**30, 1e308, -5.5, float("nan"), float("inf"), "", "send", [], [1], [None],
          [[1]], {}, {"a": 1}]


def damaged(rng: random.Random) -> str:
    """A trace's JSON with one fault: a field, a column or a value is lost, or has become something else."""
    data = copy.deepcopy(rng.choice([MODELLED, LOGICAL]))
    holder = data if rng.random() < 0.3 else data["events"]
    name = rng.choice(list(holder))
    if rng.random() < 0.1:
        holder.pop(name)
        return json.dumps(data)
    if holder is data["events"] and rng.random() < 0.9:
        holder, name = holder[name], rng.randrange(len(holder[name]))
        if isinstance(holder[name], list) and rng.random() < 0.5:
            holder, name = holder[name], rng.randrange(len(holder[name]))
    holder[name] = rng.choice(VALUES)
    return json.dumps(data)


@pytest.mark.slow
def test_a_damaged_trace_is_refused_or_still_plays():
    num_refused = 0
    for seed in range(400):
        try:
            trace = Trace.from_json(damaged(random.Random(seed)))
        except TraceError as error:
            assert "\n" not in str(error) and len(str(error)) < 250, (seed, error)
            num_refused += 1
            continue
        try:
            play(trace)
        except ValueError as error:  # such as a trace whose sends are gone; anything else is an error of ours
            assert str(error).startswith("this trace"), (seed, error)
    assert num_refused > 200


@pytest.mark.parametrize("field, value, words", [
    ("rank", "0", "has rank '0', which must be a rank"),
    ("kind", None, "has kind None, which must be text"),
    ("chunk", 10**9, "has chunk 1000000000, which must be a whole number of at least 0 and not too large"),
    ("num_bytes", -1, "has num_bytes -1, which must be a number of bytes"),
    ("end_s", -1.0, "ends at -1.0 s, before it starts at"),
    ("contributions", [1, 1], "has 2 contributions, and there are 4 ranks"),
])
def test_an_invalid_value_is_named(field, value, words):
    data = copy.deepcopy(MODELLED)
    first = data["events"]["kind"].index("send")
    data["events"][field][first] = value
    with pytest.raises(TraceError, match=f"event {first} {words}"):
        Trace.from_json(json.dumps(data))


@pytest.mark.parametrize("field, value, words", [
    ("world_size", 10**30, "world_size must be a whole number up to 1048576"),
    ("name", 5, "name must be text, not 5"),
])
def test_an_invalid_header_is_named(field, value, words):
    with pytest.raises(TraceError, match=words):
        Trace.from_json(json.dumps({**MODELLED, field: value}))


JOB = Job(num_nodes=100, mtbf_s=100 * 10_000, save_s=60, restart_s=120)


def best_interval(job):
    """The interval of the largest expected goodput, found by trying many."""
    tried = [job.save_s * 1.002 ** k for k in range(-2000, 6000)]
    return max(tried, key=lambda interval_s: expected_goodput(job, interval_s))


@pytest.mark.parametrize("mean_s", [1e3, 1e4, 1e6])
def test_dalys_interval_is_the_best_and_youngs_is_near(mean_s):
    job = replace(JOB, mtbf_s=100 * mean_s)
    assert daly(60, mean_s) == pytest.approx(best_interval(job), rel=0.01)
    assert young(60, mean_s) == pytest.approx(best_interval(job), rel=1.5 * math.sqrt(60 / mean_s))
    assert young(60, 1e4) == pytest.approx(1095.4, rel=1e-4)


def test_where_saving_takes_longer_than_the_job_lives_daly_saves_once_a_failure():
    assert daly(200, 100) == 100


@pytest.mark.parametrize("interval_s", [300, 1095, 4000])
def test_a_long_run_keeps_the_share_that_is_expected(interval_s):
    ended = run(JOB, interval_s, 2e7, seed=1)
    assert ended.goodput == pytest.approx(expected_goodput(JOB, interval_s), abs=0.01)
    assert ended.waiting_s == 0 and ended.num_failures == pytest.approx(2000, rel=0.1)


def test_all_seconds_of_a_run_are_accounted_for():
    ended = run(replace(JOB, repair_s=50_000, num_spares=1), 1000, 1e6, seed=3)
    kept = ended.useful_s / 1000
    assert kept == pytest.approx(round(kept)) and ended.saving_s == pytest.approx(60 * kept)
    assert 1e6 <= ended.total_s < 1e6 + 60_000 and ended.waiting_s > 0
    assert ended == run(replace(JOB, repair_s=50_000, num_spares=1), 1000, 1e6, seed=3)


def test_spares_save_the_wait_for_repairs():
    waits = [run(replace(JOB, repair_s=30_000, num_spares=k), 1095, 1e6, seed=2).waiting_s for k in (0, 2, 20)]
    assert waits[0] > 2 * waits[1] > 0 and waits[2] == 0


def test_without_failures_only_saving_costs():
    ended = run(replace(JOB, mtbf_s=1e15), 540, 6e5, seed=0)
    assert ended.goodput == pytest.approx(0.9) and ended.num_failures == 0 and ended.lost_s == 0


def test_an_interval_far_above_the_time_between_failures_keeps_nothing():
    assert expected_goodput(JOB, 1e7) == 0 and expected_goodput(JOB, 1e5) < 0.01


@pytest.mark.parametrize("wrong", [{"num_nodes": 0}, {"num_spares": -1}, {"mtbf_s": 0}, {"save_s": -1}])
def test_an_impossible_job_is_refused(wrong):
    with pytest.raises(ValueError, match="a job needs a node|mtbf_s must be above 0"):
        replace(JOB, **wrong)


def test_an_interval_of_zero_is_refused():
    with pytest.raises(ValueError, match="both must be above 0"):
        run(JOB, 0, 100, seed=0)
