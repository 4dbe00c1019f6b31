"""The simulator against closed forms, a second simulator, real ranks, and what must hold for any link."""
from __future__ import annotations

from functools import partial
from itertools import pairwise, product
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings, strategies as st

from book import collectives, cost
from book.collectives import COLLECTIVES, broadcast, hierarchical_all_reduce, ring_all_reduce, tree_all_reduce
from book.cost import Link, Network, bytes_by_axis, flows
from book.cost.links import hierarchical_all_reduce_s, ring_all_reduce_s, ring_sent_bytes
from book.launch import launch
from book.mesh import Mesh, MeshError
from book.parallel.tensor import all_reduce_then_identity, by_columns, by_rows, identity_then_all_reduce
from book.parallel.tensor.products import mine
from book.pipelines import gpipe, interleaved, one_f_one_b
from book.replay import pipeline_order
from book.schedule import OPS, Schedule, ScheduleError
from book.shards import trace_mlp, trace_product
from book.simulate import (
    done_s, simulate, simulate_groups, simulate_hybrid, simulate_mlp, simulate_pipeline, simulate_product,
)
from book.simulate.at_scale import alike
from book.simulate.messages import rounds, steps
from book.trace import Trace, TraceError
from book.widgets import mesh_explorer, play, sharded_product
from book.widgets.shards_run import read_play
from tests.simulate_reference import Played


TIMED = [name for name, collective in COLLECTIVES.items() if collective.time_s]
LINK = Link(latency_s=1e-5, bandwidth_bytes_per_s=1e9)
approx = partial(pytest.approx, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("name", TIMED)
@settings(max_examples=30, deadline=None)
@given(data=st.data(), world_size=st.integers(1, 40), num_bytes=st.floats(0, 1e9), latency_s=st.floats(0, 1e-3),
       bandwidth=st.floats(1e6, 1e11))
def test_time_is_the_closed_form(name, data, world_size, num_bytes, latency_s, bandwidth):
    sizes = COLLECTIVES[name].sizes(world_size)
    for arguments in [data.draw(st.sampled_from(sizes))] if sizes else []:
        simulated_s, expected_s = both_times(name, arguments, num_bytes, Link(latency_s, bandwidth))
        assert simulated_s == pytest.approx(expected_s, rel=1e-9, abs=1e-15)


def both_times(name: str, arguments: tuple[int, ...], num_bytes: float, link: Link) -> tuple[float, float]:
    """The time that a collective takes, simulated and by its closed form."""
    trace = simulate(COLLECTIVES[name].schedule(*arguments), num_bytes, link, contributions=False)
    return trace.duration_s or 0.0, COLLECTIVES[name].time_s(*arguments, num_bytes, link)


@pytest.mark.parametrize("name", TIMED)
@pytest.mark.parametrize("world_size", [2, 3, 4, 6, 8, 13, 32])
def test_additions_cost_what_the_closed_form_says(name, world_size):
    for arguments in COLLECTIVES[name].sizes(world_size):
        simulated_s, expected_s = both_times(name, arguments, 1e6, Link(1e-5, 1e9, reduce_s_per_byte=3e-10))
        if COLLECTIVES[name].exact(world_size):
            assert simulated_s == pytest.approx(expected_s, rel=1e-9)
        else:
            assert simulated_s <= expected_s * (1 + 1e-9)


def test_no_all_reduce_beats_the_lower_bounds():
    for world_size in (3, 8, 13):
        for schedule in all_schedules(world_size, promise="all_reduce"):
            seconds = simulate(schedule, 1e6, LINK).duration_s
            assert seconds >= cost.latency_bound_s(world_size, LINK)
            assert seconds >= cost.bandwidth_bound_s(world_size, 1e6, LINK) * (1 - 1e-12)


def test_tree_wins_small_messages_and_ring_large_ones():
    def seconds(make, num_bytes):
        return simulate(make(16), num_bytes, LINK).duration_s
    assert seconds(collectives.tree_all_reduce, 1e3) < seconds(collectives.ring_all_reduce, 1e3)
    assert seconds(collectives.ring_all_reduce, 1e8) < seconds(collectives.tree_all_reduce, 1e8)


@settings(max_examples=40, deadline=None)
@given(data=st.data(), world_size=st.integers(2, 12), straggler=st.integers(0, 11), factor=st.floats(1, 20))
def test_one_transfer_at_a_time_per_direction_even_with_a_straggler(data, world_size, straggler, factor):
    schedule = data.draw(st.sampled_from(all_schedules(world_size)))
    trace = simulate(schedule, 1e6, LINK, slowdown={straggler % world_size: factor})
    for kind in ("send", "recv"):
        events = trace.of_kind(kind)
        for rank in range(world_size):
            mine = events.array("rank") == rank
            spans = sorted({*zip(events.array("start_s")[mine], events.array("end_s")[mine])})
            assert all(end <= start + 1e-15 for (_, end), (start, _) in pairwise(spans))


def all_schedules(world_size: int, promise: str | None = None) -> list[Schedule]:
    """Every collective of the book on so many ranks, or those that promise `promise`."""
    return [schedule for collective in COLLECTIVES.values() if promise in (None, collective.promise)
            for schedule in collective.schedules(world_size)]


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    """One of the book's collectives, or moves in no order at all."""
    world_size = draw(st.integers(2, 6))
    if draw(st.booleans()):
        return draw(st.sampled_from(all_schedules(world_size)))
    num_chunks, ranks = draw(st.integers(1, 3)), range(world_size)
    possible = [move for move in product(range(5), ranks, ranks, range(num_chunks), OPS) if move[1] != move[2]]
    moves = draw(st.lists(st.sampled_from(possible), max_size=25))
    return Schedule("drawn", world_size, num_chunks, moves, "all_reduce")


def some(least: float, most: float) -> st.SearchStrategy[float]:
    """Numbers of which many are equal, so that what ends at the same time is tried too, and others that are not."""
    return st.integers(int(least) + 1, int(most)) | st.floats(least + 0.1, most)


some_links = st.builds(Link, st.just(0.0) | some(0, 9), some(0, 9), st.just(0.0) | some(0, 9))


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(data=st.data(), schedule=schedules(), num_bytes=st.just(0.0) | some(0, 60), link=some_links)
def test_times_equal_those_of_a_simulator_without_arrays(data, schedule, num_bytes, link):
    rank = st.integers(0, schedule.world_size - 1)
    slowdown = data.draw(st.dictionaries(rank, some(0, 5), max_size=3), "slowdown")
    pairs = st.tuples(rank, rank).filter(lambda pair: pair[0] != pair[1])
    links = data.draw(st.dictionaries(pairs, some_links, max_size=4), "links")
    trace = simulate(schedule, num_bytes, link, slowdown=slowdown, links=links, contributions=False)
    alike = Played(schedule.moves, num_bytes / schedule.num_chunks, link, links, slowdown)
    assert len(trace.events) == 2 * len(schedule.moves)
    for move, sent, received in zip(schedule.moves, trace.events[::2], trace.events[1::2], strict=True):
        message = move.step, move.src, move.dst
        assert (sent.kind, sent.step, sent.rank, sent.peer, sent.chunk) == ("send", *message, move.chunk)
        assert (received.kind, received.step, received.peer, received.rank) == ("recv", *message)
        assert received.op == move.op and received.num_bytes == sent.num_bytes == num_bytes / schedule.num_chunks
        assert (sent.start_s, sent.end_s) == approx((alike.left_s[message], alike.arrived_s[message]))
        assert (received.start_s, received.end_s) == approx((alike.left_s[message], alike.done_s[message]))


def test_a_slow_sender_is_as_slow_as_a_slow_receiver():
    message = Schedule("message", 2, 1, [(0, 0, 1, 0, "copy")], "broadcast")
    for slowdown, seconds in (({}, 2), ({0: 5}, 10), ({1: 5}, 10), ({0: 5, 1: 3}, 10)):
        assert simulate(message, 1, Link(1, 1), slowdown=slowdown).duration_s == seconds


def test_a_rank_adds_one_message_after_the_other():
    """Two messages come one second apart, and each takes nine seconds to add: the second waits for the first."""
    into_one = Schedule("into_one", 3, 1, [(0, 1, 0, 0, "reduce"), (0, 2, 0, 0, "reduce")], "reduce")
    trace = simulate(into_one, 1, Link(0, 1, reduce_s_per_byte=9))
    assert [(e.peer, e.start_s, e.end_s) for e in trace.of_kind("recv")] == [(1, 0, 10), (2, 1, 19)]


def test_a_straggler_delays_only_the_ranks_that_wait_for_it():
    """Dataflow, not barriers: in a tree the other half goes on as if nothing were slow."""
    schedule = collectives.tree_all_reduce(8)
    calm, slow = (simulate(schedule, 1e6, LINK, slowdown=s) for s in ({}, {7: 10.0}))

    def end_of_first_half(trace):
        return max(e.end_s for e in trace.of_kind("recv") if e.op == "reduce" and e.rank in (0, 2) and e.peer < 4)
    assert end_of_first_half(calm) == end_of_first_half(slow)
    assert slow.duration_s > calm.duration_s


def test_a_ring_with_a_straggler_runs_at_its_pace():
    slow = simulate(collectives.ring_all_reduce(8), 8e6, LINK, slowdown={3: 4.0}).duration_s
    calm = simulate(collectives.ring_all_reduce(8), 8e6, LINK).duration_s
    assert slow > 3.5 * calm


def test_one_slow_link_can_be_given_alone():
    slow_link = Link(LINK.latency_s, LINK.bandwidth_bytes_per_s / 10)
    schedule = collectives.ring_all_reduce(4)
    one = simulate(schedule, 4e6, LINK, links={(1, 2): slow_link})
    sends = {(e.rank, e.peer): e.end_s - e.start_s for e in one.of_kind("send")}
    assert sends[1, 2] == pytest.approx(slow_link.transfer_s(1e6))
    assert sends[0, 1] == pytest.approx(LINK.transfer_s(1e6))


MADE_BY = {"output": "F", "gradient": "B"}


def test_outputs_and_gradients_between_two_stages_do_not_wait_for_each_other():
    """A link has two directions: messages cross, and in each direction one leaves when the one before is there."""
    trace = simulate_pipeline(interleaved(4, 8, 2), 1.0, 1.0, link=Link(0.0, 1.0), num_bytes=1.5)
    sends = trace.of_kind("send")
    both = [(a, b) for a in sends for b in sends if (a.rank, b.rank) == (0, 1)]
    assert any(a.start_s < b.end_s and b.start_s < a.end_s for a, b in both)
    made_s = {(e.rank, e.op, e.stage, e.micro_batch): e.end_s for e in trace.of_kind("compute")}
    for rank in (0, 1):
        free_s = 0.0
        for send in sorted((e for e in sends if e.rank == rank), key=lambda e: e.start_s):
            assert send.start_s == max(made_s[rank, MADE_BY[send.op], send.stage, send.micro_batch], free_s)
            free_s = send.end_s


def test_a_fractional_link_is_not_rounded_next_to_an_integer_one():
    message = Schedule("message", 2, 1, [(0, 0, 1, 0, "reduce")], "all_reduce")
    assert simulate(message, 1, Link(1, 1, 0), links={(0, 1): Link(1.5, 1, 0.25)}).duration_s == 2.75


def test_equal_moves_are_one_message():
    """Two chunks between the same ranks in one step pay the latency once."""
    link = Link(1.0, 1e9)
    together = Schedule("pair", 2, 2, [(0, 0, 1, 0, "copy"), (0, 0, 1, 1, "copy")], "broadcast")
    apart = Schedule("pair", 2, 2, [(0, 0, 1, 0, "copy"), (1, 0, 1, 1, "copy")], "broadcast")
    assert simulate(together, 0, link).duration_s == 1.0
    assert simulate(apart, 0, link).duration_s == 2.0


@pytest.mark.parametrize("num_ranks, watched", [(64, True), (65, False)])
def test_contributions_are_kept_up_to_64_ranks(num_ranks, watched):
    event = next(iter(simulate(collectives.broadcast(num_ranks), 8.0, LINK).events))
    assert bool(event.contributions) is watched


def test_contributions_of_a_message_and_of_the_chunk_after_it():
    trace = simulate(collectives.ring_all_reduce(3), 3, LINK)
    first = [e for e in trace.events if e.step == 0 and 1 in (e.rank, e.peer) and e.chunk == 0 and e.kind != "hold"]
    assert [(e.rank, e.kind, e.op, e.contributions) for e in first] == [
        (0, "send", None, (1, 0, 0)), (1, "recv", "reduce", (1, 1, 0))]
    assert set(trace.held().values()) == {(1, 1, 1)}
    assert trace.num_steps == 4 and trace.num_chunks == 3
    assert np.allclose(trace.sent_bytes(), 4)


def test_a_message_into_another_chunk_is_sent_as_one_and_received_as_the_other():
    trace = simulate(collectives.all_to_all(2), 2, LINK)
    assert [(e.rank, e.kind, e.chunk, e.contributions) for e in trace.events if e.kind != "hold"] == [
        (0, "send", 1, (1, 0)), (1, "recv", 0, (1, 0)), (1, "send", 0, (0, 1)), (0, "recv", 1, (0, 1))]
    assert trace.held() == {(r, c): (1 - c, c) for r in (0, 1) for c in (0, 1)}


def test_a_single_rank_and_an_empty_buffer_just_work():
    assert simulate(collectives.ring_all_reduce(1), 100, LINK).held() == {(0, 0): (1,)}
    assert simulate(collectives.ring_all_reduce(4), 0, LINK).duration_s == pytest.approx(6e-5)


@pytest.mark.parametrize("arguments, complaint", [
    ({"num_bytes": -1}, "num_bytes can't be -1"), ({"slowdown": {9: 2.0}}, "rank 9"),
    ({"slowdown": {1: 0.0}}, "factor 0.0"), ({"links": {(0, 7): LINK}}, "must name two different ranks of 0..3")])
def test_bad_input_gets_one_clear_sentence(arguments, complaint):
    with pytest.raises(ValueError, match=complaint):
        simulate(collectives.ring_all_reduce(4), **{"num_bytes": 1, "link": LINK, **arguments})


@pytest.mark.parametrize("numbers", [(-1, 1), (0, 0), (0, -5), (float("nan"), 1), (0, 1, -1)])
def test_an_invalid_link_is_refused(numbers):
    with pytest.raises(ValueError, match="must be positive|can't be negative"):
        Link(*numbers)


def test_the_duration_of_a_part_of_a_trace_counts_from_its_first_event():
    whole = simulate(collectives.ring_all_reduce(4), 4e6, LINK)
    last = [event for event in whole.events if event.step == 5]
    assert Trace(last, 4, "modelled", "simulated").duration_s == pytest.approx(LINK.transfer_s(1e6))


def test_bus_bandwidth_factors():
    assert cost.bus_bandwidth_bytes_per_s("all_reduce", 4, 1e9, 1.0) == 1.5e9
    assert cost.bus_bandwidth_bytes_per_s("all_gather", 4, 1e9, 0.5) == 1.5e9
    assert cost.bus_bandwidth_bytes_per_s("broadcast", 4, 1e9, 1.0) == 1e9
    for name in ("scatter", "gather", "all_to_all"):
        assert cost.bus_bandwidth_bytes_per_s(name, 4, 1e9, 1.0) == 7.5e8
    with pytest.raises(ValueError, match="no bus factor for 'gossip'"):
        cost.bus_bandwidth_bytes_per_s("gossip", 4, 1e9, 1.0)


def test_a_fit_recovers_the_link_that_produced_the_times():
    sizes = [1e3, 1e5, 1e7]
    fitted = cost.fit_ring_link(4, sizes, [cost.ring_all_reduce_s(4, n, LINK) for n in sizes])
    assert fitted.latency_s == pytest.approx(LINK.latency_s)
    assert fitted.bandwidth_bytes_per_s == pytest.approx(LINK.bandwidth_bytes_per_s)
    with pytest.raises(ValueError, match="don't determine a link"):
        cost.fit_ring_link(4, [1e3, 1e3], [1e-4, 1e-4])


FAST = Link(latency_s=1e-6, bandwidth_bytes_per_s=1e11)


@st.composite
def book_schedules(draw: st.DrawFn) -> Schedule:
    """One of the book's collectives, on up to 20 ranks."""
    made = [one for collective in COLLECTIVES.values() for one in collective.schedules(draw(st.integers(1, 20)))]
    return draw(st.sampled_from(made))


@st.composite
def networks(draw: st.DrawFn) -> Network:
    """Nodes of up to five ranks, with one card or more, whose switch may be the bottleneck."""
    ranks_per_node = draw(st.integers(1, 5))
    return Network(ranks_per_node, draw(some_links), draw(some_links), draw(st.integers(1, ranks_per_node)),
                   draw(st.just(float("inf")) | some(0, 20)))


def seen_in_the_trace(schedule: Schedule, *arguments: object, **options: object) -> np.ndarray:
    """When each rank's last event in the trace of `simulate` ends, shape (R,)."""
    events = simulate(schedule, *arguments, contributions=False, **options).events
    done = np.zeros(schedule.world_size)
    if len(events):
        np.maximum.at(done, events.array("rank"), events.array("end_s"))
    return done


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(data=st.data(), schedule=book_schedules() | schedules(), num_bytes=st.just(0.0) | some(0, 60), link=some_links)
def test_ranks_with_links_of_their_own_are_done_when_their_trace_ends(data, schedule, num_bytes, link):
    slowdown = data.draw(st.dictionaries(st.integers(0, schedule.world_size - 1), some(0, 5), max_size=2), "slowdown")
    expected = seen_in_the_trace(schedule, num_bytes, link, slowdown=slowdown)
    assert (done_s(schedule, num_bytes, link, slowdown=slowdown) == expected).all()


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(data=st.data(), schedule=book_schedules() | schedules(), num_bytes=st.just(0.0) | some(0, 60),
       network=networks())
def test_ranks_that_share_cards_are_done_when_their_trace_ends(data, schedule, num_bytes, network):
    slowdown = data.draw(st.dictionaries(st.integers(0, schedule.world_size - 1), some(0, 5), max_size=1), "slowdown")
    expected = seen_in_the_trace(schedule, num_bytes, network, slowdown=slowdown)
    assert done_s(schedule, num_bytes, network, slowdown=slowdown) == pytest.approx(expected, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("name", COLLECTIVES)
def test_the_rounds_of_a_schedule_are_its_messages(name):
    for schedule in (one for world_size in (1, 2, 3, 6, 8) for one in COLLECTIVES[name].schedules(world_size)):
        counted = [one[:4] for one in rounds(schedule) for _ in range(one.num_steps)]
        listed = [step[:4] for step in steps(schedule, 1)]
        assert len(counted) == len(listed)
        assert all((a == b).all() for one, other in zip(counted, listed) for a, b in zip(one, other))
        assert (schedule.num_moves, schedule.num_steps) == (len(schedule.moves), 1 + max(
            (move.step for move in schedule.moves), default=-1))


def classes(schedule: Schedule, slowdown: dict[int, float], ranks_per_node: int | None = None) -> list[int]:
    """A label for each rank, where none or all messages to other nodes count as such."""
    given_rounds, factors = list(rounds(schedule)), np.ones(schedule.world_size)
    factors[list(slowdown)] = list(slowdown.values())
    crosses = [one.src // (ranks_per_node or schedule.world_size) != one.dst // (ranks_per_node or schedule.world_size)
               for one in given_rounds]
    return alike(given_rounds, crosses, factors, ranks_per_node).tolist()


def test_who_is_alike():
    assert len(set(classes(ring_all_reduce(64), {}))) == 1
    assert len(set(classes(ring_all_reduce(64), {5: 2.0}))) == 64
    assert len(set(classes(hierarchical_all_reduce(4, 4), {}))) == 1
    assert classes(ring_all_reduce(12), {}, ranks_per_node=3) == [0, 1, 2] * 4
    assert len(set(classes(ring_all_reduce(11), {}, ranks_per_node=3))) == 11, "the last node is not full"
    tree = classes(tree_all_reduce(16), {})
    assert len(set(tree)) == 16, "each rank of a binomial tree meets others than the rest"


def test_no_rank_is_like_another_where_one_sends_twice_in_a_step():
    twice = Schedule("twice", 4, 1, [(0, 0, 1, 0, "copy"), (0, 0, 2, 0, "copy"), (0, 3, 0, 0, "copy")], "all_reduce")
    assert len(set(classes(twice, {}))) == 4


@pytest.mark.slow
def test_thousands_of_ranks_take_the_time_of_the_closed_form():
    assert done_s(ring_all_reduce(4096), 4e8, LINK).max() == pytest.approx(ring_all_reduce_s(4096, 4e8, LINK))
    assert done_s(hierarchical_all_reduce(512, 8), 4e8, LINK).max() == pytest.approx(
        hierarchical_all_reduce_s(512, 8, 4e8, LINK))


@pytest.mark.slow
def test_a_ring_of_hosts_waits_for_its_cards_only():
    """A ring sends one message at a time over each card, so all its steps take as long as that."""
    shared = done_s(ring_all_reduce(512), 4e8, Network(8, FAST, LINK)).max()
    assert shared == pytest.approx(ring_all_reduce_s(512, 4e8, LINK), rel=1e-3)


def test_too_many_messages_on_shared_cards_are_refused():
    with pytest.raises(ValueError, match="too few ranks of this schedule are alike: 2,095,104 messages"):
        done_s(ring_all_reduce(1024), 1.0, Network(8, FAST, LINK), slowdown={0: 2.0})


@pytest.mark.parametrize("arguments, complaint", [
    ({"num_bytes": -1}, "num_bytes can't be -1"), ({"slowdown": {9: 2.0}}, "rank 9")])
def test_bad_input_is_refused_as_in_simulate(arguments, complaint):
    with pytest.raises(ValueError, match=complaint):
        done_s(ring_all_reduce(4), **{"num_bytes": 1, "link": LINK, **arguments})


MESH = Mesh.of({"pp": 2, "dp": 2, "tp": 2}, ranks_per_node=4)


def test_every_group_of_each_axis_has_its_collective_axis_by_axis() -> None:
    grid = Mesh.of({"column": 2, "row": 3})
    trace = simulate_groups(grid, 96, "row", "column")
    assert [[event.group for event in trace.of_rank(rank)] for rank in (0, 4)] == [[(0, 1, 2), (0, 3)],
                                                                                  [(3, 4, 5), (1, 4)]]
    assert "as simulated" in mesh_explorer(trace, grid)._repr_mimebundle_()[0]["text/html"]
    with pytest.raises(MeshError):
        simulate_groups(grid, 96, "tp")


@pytest.mark.parametrize("make", [gpipe, one_f_one_b])
def test_each_pipeline_of_a_mesh_runs_the_schedule(make) -> None:
    trace = simulate_hybrid(make(2, 4), MESH, 1000, (5000, 5000))
    for first, second in MESH.groups("pp"):
        assert list(pipeline_order(trace, ranks=[first, second]).actions) == list(make(2, 4).actions)


def test_bytes_go_along_the_axes_as_the_formulas_say() -> None:
    sent = bytes_by_axis(flows(simulate_hybrid(one_f_one_b(2, 4), MESH, 1000, (5000, 400), num_all_reduces=3), MESH), 8)
    assert list(sent["pp"]) == [4 * 1000] * 8
    assert list(sent["dp"]) == [ring_sent_bytes(2, 5000)] * 4 + [ring_sent_bytes(2, 400)] * 4
    assert list(sent["tp"]) == [4 * 2 * 3 * ring_sent_bytes(2, 1000)] * 8


def test_a_mesh_may_lack_replicas_and_tensor_parallel_ranks_but_no_pipeline() -> None:
    trace = simulate_hybrid(one_f_one_b(4, 2), Mesh.of({"pp": 4}), 10, [10] * 4)
    assert not len(trace.of_kind("collective")) and trace.world_size == 4
    with pytest.raises(ScheduleError, match="has 4 ranks, and pp has 2"):
        simulate_hybrid(one_f_one_b(4, 2), MESH, 10, (10, 10))
    with pytest.raises(MeshError):
        simulate_hybrid(one_f_one_b(4, 2), Mesh.of({"dp": 4}), 10, (10,))


def test_a_renumbered_run_is_the_same_between_other_ranks() -> None:
    trace = simulate(broadcast(4), 64, Link(1e-5, 1e9))
    other = trace.renumbered([2, 3, 0, 1])
    assert all(contents == (0, 0, 1, 0) for contents in other.held().values())
    assert sorted(event.peer for event in other.of_kind("send") if event.rank == 2) == [0] * 4 + [3] * 4
    assert other.renumbered([2, 3, 0, 1]).events == trace.events and other.promise is None
    assert "every rank holds rank 2" in play(other, promise="broadcast")._repr_mimebundle_()[0]["text/html"]
    groups = simulate_groups(Mesh.of({"row": 2, "column": 2}), 8, "column").renumbered([3, 2, 1, 0])
    assert {event.group for event in groups.of_rank(3)} == {(2, 3)}


@pytest.mark.parametrize("numbers", [[0, 1, 2], [0, 1, 2, 2], [1, 2, 3, 4]])
def test_ranks_can_be_renumbered_with_all_their_numbers_only(numbers: list[int]) -> None:
    with pytest.raises(TraceError, match="must be the ranks 0 to 3 in some order"):
        simulate(broadcast(4), 64, Link(1e-5, 1e9)).renumbered(numbers)


def mlp(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    hidden = F.gelu(identity_then_all_reduce(x) @ mine(a, dim=1))
    return all_reduce_then_identity(hidden @ mine(b, dim=0))


def story(trace: Trace) -> list[Any]:
    """What the widget plays of a trace."""
    play = read_play(trace)
    moments = [(moment.kind, moment.name, {rank: (act.kind, act.name, sorted(map(str, act.blocks)), act.holds,
                                                  act.num_multiplications) for rank, act in moment.acts.items()})
               for moment in play.moments]
    return [play.world_size, play.shapes, play.start, moments]


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("program, simulated", [
    ((trace_product, by_columns), lambda num_ranks: simulate_product("M", num_ranks)),
    ((trace_product, by_rows), lambda num_ranks: simulate_product("D", num_ranks)),
    ((trace_mlp, mlp), simulate_mlp), ((trace_mlp, mlp, True), lambda num_ranks: simulate_mlp(num_ranks, True))],
    ids=["columns", "rows", "MLP", "MLP and backward"])
def test_a_simulated_product_is_that_of_real_ranks(program: Any, simulated: Any, num_ranks: int) -> None:
    trace, *arguments = program
    assert story(simulated(num_ranks)) == story(launch(trace, num_ranks, *arguments, record=True).trace)


@pytest.mark.parametrize("cut, num_ranks", [("T", 2), ("M", 5), ("D", 5)])
def test_only_the_sum_or_the_columns_can_be_cut_and_equally(cut: str, num_ranks: int) -> None:
    with pytest.raises(ValueError, match="choose one of M, D"):
        simulate_product(cut, num_ranks)


def test_the_widget_says_that_it_is_simulated() -> None:
    shown = sharded_product(simulate_mlp(backward=True))._repr_mimebundle_()[0]
    assert "simulated" in shown["text/plain"] and "(simulated)" in shown["text/html"]
    assert "recorded" not in shown["text/plain"] + shown["text/html"]
