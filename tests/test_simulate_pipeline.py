"""Simulated pipelines: times worked out by hand, messages on links, slow ranks, and impossible input."""
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from book.collectives import ring_all_reduce
from book.cost import Link
from book.pipelines import gpipe, interleaved, one_f_one_b, zero_bubble
from book.replay import bubble
from book.schedule import PipelineSchedule, ScheduleError
from book.simulate import simulate, simulate_pipeline
from book.trace import Trace


def spans(trace, rank):
    return [(f"{e.op}{e.micro_batch}", e.start_s, e.end_s) for e in trace.of_rank(rank) if e.kind == "compute"]


def test_two_stages_by_hand():
    trace = simulate_pipeline(one_f_one_b(2, 2), 1, 2)
    assert spans(trace, 0) == [("F0", 0, 1), ("F1", 1, 2), ("B0", 4, 6), ("B1", 7, 9)]
    assert spans(trace, 1) == [("F0", 1, 2), ("B0", 2, 4), ("F1", 4, 5), ("B1", 5, 7)]
    assert trace.duration_s == 9 and trace.clock == "modelled" and trace.name == "one_f_one_b"
    assert bubble(trace).idle_s == (3, 3) and bubble(trace).share == pytest.approx(1 / 3)


def test_a_split_backward_sends_its_gradient_before_its_weights():
    order = PipelineSchedule.from_csv("# own,2,1\n0F0,0I0,0W0\n1F0,1I0,1W0")
    trace = simulate_pipeline(order, 1, 3, weight_s=2)
    assert spans(trace, 0) == [("F0", 0, 1), ("I0", 3, 4), ("W0", 4, 6)]
    assert spans(trace, 1) == [("F0", 1, 2), ("I0", 2, 3), ("W0", 3, 5)]


def test_weights_do_not_wait_until_the_gradient_has_arrived():
    """It is on its way to the stage before, and the rank that has made it goes on."""
    order = PipelineSchedule.from_csv("# own,2,1\n0F0,0I0,0W0\n1F0,1I0,1W0")
    trace = simulate_pipeline(order, 1, 3, weight_s=2, link=Link(5, 1))
    assert spans(trace, 1) == [("F0", 6, 7), ("I0", 7, 8), ("W0", 8, 10)]
    assert spans(trace, 0) == [("F0", 0, 1), ("I0", 13, 14), ("W0", 14, 16)]


def test_a_pair_of_ranks_may_have_its_own_link():
    links = {(0, 1): Link(2, 1), (1, 0): Link(4, 1)}
    trace = simulate_pipeline(gpipe(3, 1), 1, 1, link=Link(1, 1), links=links)
    assert [e.end_s - e.start_s for e in trace.of_kind("send")] == [2, 1, 1, 4]
    alone = simulate_pipeline(gpipe(3, 1), 1, 1, links=links)
    assert [(e.rank, e.peer) for e in alone.of_kind("send")] == [(0, 1), (1, 0)], "others arrive at once"


@pytest.mark.parametrize("pair", [(0, 2), (1, 1), (-1, 0)])
def test_a_link_between_ranks_that_do_not_exist_is_refused(pair):
    with pytest.raises(ValueError, match="must name two different ranks of 0 to 1"):
        simulate_pipeline(gpipe(2, 2), 1, 1, links={pair: Link(1, 1)})


def test_messages_take_time_and_share_a_link():
    trace = simulate_pipeline(gpipe(2, 2), 1, 1, link=Link(0.5, 100), num_bytes=100)
    assert spans(trace, 1)[:2] == [("F0", 2.5, 3.5), ("F1", 4, 5)]
    sent = [(e.rank, e.peer, e.op, e.stage, e.micro_batch, e.start_s, e.end_s) for e in trace.of_kind("send")]
    assert sent == [(0, 1, "output", 0, 0, 1, 2.5), (0, 1, "output", 0, 1, 2.5, 4),
                    (1, 0, "gradient", 1, 0, 6, 7.5), (1, 0, "gradient", 1, 1, 7.5, 9)]
    assert trace.sent_bytes().tolist() == [200, 200]


def test_outputs_and_gradients_travel_at_the_same_time():
    trace = simulate_pipeline(one_f_one_b(2, 2), 1, 1, link=Link(3, 1))
    assert [(e.op, e.micro_batch, e.start_s, e.end_s) for e in trace.of_kind("send")] == [
        ("output", 0, 1, 4), ("output", 1, 4, 7), ("gradient", 0, 6, 9), ("gradient", 1, 9, 12)]


def test_stages_of_one_rank_send_no_messages():
    trace = simulate_pipeline(zero_bubble(4, 2), 1, 2, link=Link(0, 1e9), num_bytes=8)
    hops = {(e.op, e.stage) for e in trace.of_kind("send")}
    assert hops == {("output", 0), ("output", 2), ("gradient", 1), ("gradient", 3)}


@pytest.mark.parametrize("make", [gpipe, one_f_one_b, lambda s, m: interleaved(2 * s, s * m), lambda s, m:
                                  zero_bubble(2 * s, m)])
@given(size=st.tuples(st.integers(1, 5), st.integers(1, 6)), factor=st.floats(1.1, 4))
@settings(deadline=None, max_examples=25)
def test_nothing_starts_before_what_it_needs_and_slower_is_later(make, size, factor):
    schedule, link = make(*size), Link(0.1, 1e3)
    trace = simulate_pipeline(schedule, 1, 2, link=link, num_bytes=50)
    ends = {(e.stage, e.micro_batch, {"B": "I"}.get(e.op, e.op)): e.end_s for e in trace.of_kind("compute")}
    for e in trace.of_kind("compute"):
        if e.op == "F" and e.stage:
            assert e.start_s >= ends[e.stage - 1, e.micro_batch, "F"]
        if e.op in "BI" and e.stage < schedule.num_stages - 1:
            assert e.start_s >= ends[e.stage + 1, e.micro_batch, "I"]
    for rank in range(schedule.world_size):
        own = spans(trace, rank)
        assert all(before[2] <= after[1] for before, after in pairwise(own))
    slow = simulate_pipeline(schedule, 1, 2, link=link, num_bytes=50, slowdown={0: factor})
    assert slow.duration_s > trace.duration_s


def test_a_trace_survives_json():
    trace = simulate_pipeline(interleaved(4, 2), 1, 2, link=Link(0, 1), num_bytes=1)
    assert Trace.from_json(trace.to_json()) == trace


@pytest.mark.parametrize(("arguments", "options"), [
    ((-1, 2), {}), ((1, -2), {}), ((1, 2, 3), {}), ((1, 2, -1), {}), ((1, 2), {"num_bytes": -1}),
    ((float("nan"), 2), {}), ((1, 2), {"slowdown": {4: 2.0}}), ((1, 2), {"slowdown": {0: 0}})])
def test_invalid_times_are_refused(arguments, options):
    with pytest.raises(ValueError, match="must not be|can't be|is not possible"):
        simulate_pipeline(gpipe(2, 2), *arguments, **options)


def test_an_order_that_cannot_run_is_refused():
    with pytest.raises(ScheduleError, match="this order cannot run: rank 0 waits at B0"):
        simulate_pipeline(PipelineSchedule.from_csv("# own,1,1\n0B0,0F0"), 1, 2)


def test_a_trace_without_stages_has_no_bubble():
    with pytest.raises(ValueError, match="no forwards and backwards of stages"):
        bubble(simulate(ring_all_reduce(2), 8, Link(0, 1)))
    with pytest.raises(ValueError, match="a logical clock has no times"):
        bubble(simulate_pipeline(gpipe(2, 2), 1, 2).logical())
