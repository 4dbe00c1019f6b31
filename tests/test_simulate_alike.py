"""One rank simulated for all that are alike: times are those of `simulate`, bit for bit without shared cards."""
from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from book.collectives import COLLECTIVES, hierarchical_all_reduce, ring_all_reduce, tree_all_reduce
from book.cost import Link, Network
from book.cost.links import hierarchical_all_reduce_s, ring_all_reduce_s
from book.schedule import Schedule
from book.simulate import done_s, simulate
from book.simulate.at_scale import alike
from book.simulate.messages import rounds, steps
from tests.test_simulate import LINK, schedules, some, some_links

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
