"""Cards that ranks share, and backward beside communication: fair parts of both."""
from __future__ import annotations

from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from book.collectives import COLLECTIVES, hierarchical_all_reduce, ring_all_reduce
from book.cost import Link, Network
from book.replay import overlap
from book.schedule import Schedule
from book.simulate import simulate, simulate_backward
from book.simulate.shared import fair
from book.simulate.streams import bucketed_backward, fill_buckets, stream_times
from book.widgets import bucket_timeline
from tests.test_simulate import schedules, some, some_links


FAST = Link(latency_s=0.0, bandwidth_bytes_per_s=1e15)
CARD = Link(latency_s=0.0, bandwidth_bytes_per_s=1.0)
PAIRS = Network(2, FAST, CARD)  # two ranks on a node, whose card carries a byte per second
approx = partial(pytest.approx, rel=1e-6, abs=1e-9)


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(data=st.data(), schedule=schedules(), num_bytes=st.just(0.0) | some(0, 60), link=some_links)
def test_ranks_with_cards_of_their_own_are_as_fast_as_on_links(data, schedule, num_bytes, link):
    rank = st.integers(0, schedule.world_size - 1)
    slower = st.integers(1, 5) | st.floats(1, 5)  # a rank that is faster than its card can't use it
    slowdown = data.draw(st.dictionaries(rank, slower, max_size=3), "slowdown")
    ranks_per_node = data.draw(st.integers(1, 6), "ranks per node")
    rails = Network(ranks_per_node, link, link, cards_per_node=ranks_per_node)
    on_links, on_cards = (simulate(schedule, num_bytes, one, slowdown=slowdown, contributions=False).events
                          for one in (link, rails))
    assert len(on_links) == len(on_cards)
    for one, other in zip(on_links, on_cards):
        assert (one.kind, one.rank, one.peer, one.chunk, one.step) == (other.kind, other.rank, other.peer, other.chunk,
                                                                       other.step)
        assert (other.start_s, other.end_s) == approx((one.start_s, one.end_s))


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(data=st.data(), num_messages=st.integers(1, 12), num_cards=st.integers(1, 5))
def test_a_share_is_fair(data, num_messages, num_cards):
    """No card carries too much. A message is held back by its own limit, or by a full card of which none has more."""
    card = st.integers(0, num_cards - 1)
    routes = np.array(data.draw(st.lists(st.tuples(card, card, card).map(sorted).filter(
        lambda row: len(set(row)) == 3 or num_cards < 3), min_size=num_messages, max_size=num_messages)))
    routes = routes if num_cards >= 3 else routes[:, :1]
    capacity, most = (np.array(data.draw(st.lists(some(0, 20), min_size=num, max_size=num)), dtype=float)
                      for num in (num_cards, num_messages))
    pace = fair(routes, capacity, most)
    load = np.bincount(routes.ravel(), np.repeat(pace, routes.shape[1]), minlength=num_cards)
    assert (load <= capacity * (1 + 1e-6)).all() and (pace <= most * (1 + 1e-6)).all()
    for number, passed in enumerate(routes):
        full = [one for one in passed if load[one] >= capacity[one] * (1 - 1e-6)]
        largest = [pace[(routes == one).any(axis=1)].max() for one in full]
        assert pace[number] >= most[number] * (1 - 1e-6) or any(pace[number] >= other * (1 - 1e-6)
                                                                 for other in largest)


def seconds(network: Network, *moves: tuple, num_bytes: float = 1.0) -> list[float]:
    """When each of these moves of one chunk has arrived."""
    schedule = Schedule("drawn", 1 + max(max(move[1:3]) for move in moves), 1, moves, "all_reduce")
    return [event.end_s for event in simulate(schedule, num_bytes, network).of_kind("recv")]


def test_two_messages_through_a_card_take_twice_as_long_and_two_ways_do_not_disturb_each_other():
    assert seconds(PAIRS, (0, 0, 2, 0, "copy")) == approx([1])
    assert seconds(PAIRS, (0, 0, 2, 0, "copy"), (0, 1, 3, 0, "copy")) == approx([2, 2])
    assert seconds(PAIRS, (0, 0, 2, 0, "copy"), (0, 2, 0, 0, "copy")) == approx([1, 1])
    assert seconds(PAIRS, (0, 0, 2, 0, "copy"), (0, 1, 4, 0, "copy")) == approx([2, 2]), "the sender's card"
    assert seconds(PAIRS, (0, 0, 2, 0, "copy"), (0, 4, 3, 0, "copy")) == approx([2, 2]), "the receiver's card"


def test_what_is_left_gets_the_whole_card():
    """A message that begins later, behind a latency, has half of the card until the other one has arrived."""
    later = Schedule("later", 4, 1, [(0, 3, 1, 0, "copy"), (1, 1, 2, 0, "copy"), (1, 0, 3, 0, "copy")], "all_reduce")
    trace = simulate(later, 1.0, PAIRS)
    arrived = {(event.peer, event.rank): event.end_s for event in trace.of_kind("recv")}
    assert arrived[3, 1] == approx(1) and arrived[0, 3] == approx(1), "both ways at once"
    assert arrived[1, 2] == approx(2), "it leaves when its input has come, and is then alone"


def test_a_slow_rank_does_not_take_the_cards_share_of_the_other():
    found = simulate(Schedule("slow", 4, 1, [(0, 0, 2, 0, "copy"), (0, 1, 3, 0, "copy")], "all_reduce"), 1.0, PAIRS,
                     slowdown={0: 4.0}).of_kind("recv")
    assert [event.end_s for event in found] == approx([4, 4 / 3])


def test_the_switch_limits_all_nodes_together():
    network = Network(1, FAST, CARD, switch_bytes_per_s=1.5)
    moves = [(0, 0, 1, 0, "copy"), (0, 2, 3, 0, "copy"), (0, 4, 5, 0, "copy")]
    assert seconds(network, *moves) == approx([2, 2, 2])


@pytest.mark.parametrize("num_nodes, ranks_per_node", [(2, 2), (2, 4), (4, 2), (3, 3)])
def test_hierarchical_all_reduce_sends_over_a_card_what_the_formula_says(num_nodes, ranks_per_node):
    """Each of g ranks moves 2(k-1)/k n/g over the card that they share: 2(k-1)/k n, as long as that takes."""
    network = Network(ranks_per_node, FAST, CARD)
    trace = simulate(hierarchical_all_reduce(num_nodes, ranks_per_node), 1.0, network)
    assert trace.duration_s == approx(2 * (num_nodes - 1) / num_nodes)
    ring = simulate(ring_all_reduce(num_nodes * ranks_per_node), 1.0, network)
    assert ring.duration_s > trace.duration_s, "in a ring only two ranks of a node cross"


@pytest.mark.parametrize("name", COLLECTIVES)
def test_a_shared_card_never_helps(name):
    for schedule in COLLECTIVES[name].schedules(6):
        rails, one_card = (simulate(schedule, 1e6, Network(3, FAST, CARD, cards), contributions=False).duration_s
                           for cards in (3, 1))
        assert one_card >= rails * (1 - 1e-9)


@pytest.mark.parametrize("arguments, complaint", [
    ((0, FAST, CARD), "a node of 0 ranks can't have 1 cards"), ((2, FAST, CARD, 3), "2 ranks can't have 3 cards"),
    ((2, FAST, CARD, 1, 0.0), "switch_bytes_per_s must be positive, not 0.0")])
def test_an_invalid_network_raises_a_clear_error(arguments, complaint):
    with pytest.raises(ValueError, match=complaint):
        Network(*arguments)


def test_links_beside_a_network_are_refused():
    with pytest.raises(ValueError, match="a Network says itself which link lies between two ranks"):
        simulate(ring_all_reduce(4), 1.0, PAIRS, links={(0, 1): FAST})


SIZES = {"2.bias": 8.0, "2.weight": 800.0, "0.bias": 8.0, "0.weight": 1600.0}
LINK = Link(1e-6, 1e9)


@pytest.mark.parametrize("cap_bytes", [1, 808, 1e6])
def test_all_ranks_do_what_the_streams_say(cap_bytes: float) -> None:
    trace = simulate_backward(SIZES, cap_bytes, 3, 2e-9, LINK)
    times = stream_times(bucketed_backward([*SIZES.values()], cap_bytes, 3, 2e-9, LINK))
    for rank in range(3):
        own = trace.of_rank(rank)
        assert [event.times_s for event in own] == times
        sent = [event for event in own if event.kind == "collective"]
        assert [event.num_bytes for event in sent] == [
            sum([*SIZES.values()][i] for i in bucket) for bucket in fill_buckets([*SIZES.values()], cap_bytes)]
        assert all(event.group == (0, 1, 2) for event in sent)
    assert overlap(trace).step_s == max(end_s for _, end_s in times)


def test_of_several_passes_only_the_last_one_sends() -> None:
    trace = simulate_backward(SIZES, 1e6, 2, 2e-9, LINK, num_passes=3)
    own = list(trace.of_rank(1))
    assert [event.op for event in own] == [*SIZES] * 3 + ["all_reduce"]
    assert [event.bucket for event in own] == [None] * 8 + [0] * 5
    ends = [event.times_s[1] for event in own]
    assert ends == sorted(ends) and own[-1].times_s[0] == ends[-2] == pytest.approx(3 * 2416 * 2e-9)


def test_the_timeline_says_that_it_is_simulated() -> None:
    shown = bucket_timeline(simulate_backward(SIZES, 808, 2, 2e-9, LINK))._repr_mimebundle_()[0]
    assert "order simulated" in shown["text/plain"] and "order simulated" in shown["text/html"]
    assert "recorded" not in shown["text/plain"] + shown["text/html"]
