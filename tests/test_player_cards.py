"""Network cards in the chunk player: who uses which, and how many messages share one, in words and in a browser."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from book.collectives import (COLLECTIVES, halving_doubling_all_reduce, hierarchical_all_reduce, ring_all_reduce,
                              tree_all_reduce)
from book.cost import Link, Network
from book.schedule import Schedule
from book.simulate import simulate
from book.simulate.shared import fair
from book.trace import Event, Trace
from book.widgets import play
from book.widgets.player import run_payload
from book.widgets.player_cards import cards_in_words, cards_of, loads
from book.widgets.player_run import as_trace, read_run
from tests.players import PLAYER, assert_readable, captions, click, first, press, state, until

SHARED = "Two messages at once share each card (each way): each gets at most half of it."
INSIDE, CARD = Link(0.0, 1e12), Link(0.0, 1.0)


def hosts(per: int, num_cards: int = 1) -> Network:
    """Hosts of so many ranks and cards."""
    return Network(per, INSIDE, CARD, num_cards)


def words(schedule: Schedule, network: Network) -> list[str]:
    """The sentence about each step."""
    return cards_in_words(read_run(as_trace(schedule)), network)


def test_each_step_is_told_by_the_card_that_most_messages_share() -> None:
    assert words(hierarchical_all_reduce(2, 2), hosts(2)) == [
        "No message leaves its host.", SHARED, SHARED, "No message leaves its host."]
    assert set(words(ring_all_reduce(4), hosts(2))) == {"No two messages share a card."}
    assert words(halving_doubling_all_reduce(8), hosts(4))[0].endswith("(each way): each gets at most a quarter of it.")
    assert words(tree_all_reduce(4), hosts(2))[:2] == ["No message leaves its host.", "No two messages share a card."]


@pytest.mark.parametrize("moves, number, cards, part", [
    ([(0, 2), (1, 4)], "Two", "host 0's card (out)", "half"),
    ([(2, 0), (4, 1)], "Two", "host 0's card (in)", "half"),
    ([(0, 2), (1, 3)], "Two", "host 0's card (out) and host 1's card (in)", "half"),
    ([(0, 2), (1, 3), (2, 0), (3, 1)], "Two", "host 0's card and host 1's card (each way)", "half"),
    ([(0, 2), (1, 3), (0, 4)], "Three", "host 0's card (out)", "a third"),
    ([(r, r + 2) for r in range(8)], "Two",
     "each of 3 cards (each way), host 0's card (out) and host 4's card (in)", "half")])
def test_the_cards_that_are_shared_are_named_with_the_ways(moves: list[tuple[int, int]], number: str, cards: str,
                                                           part: str) -> None:
    """Of six hosts."""
    made = Schedule("drawn", 12, 1, [(0, src, dst, 0, "copy") for src, dst in moves], "broadcast")
    assert words(made, hosts(2)) == [f"{number} messages at once share {cards}: each gets at most {part} of it."]


def test_with_a_card_for_each_rank_none_is_shared() -> None:
    found = cards_of(read_run(as_trace(hierarchical_all_reduce(2, 2))), hosts(2, 2))
    assert found["texts"] == ["No message leaves its host.", "No two messages share a card."]
    assert found["of"] == [0, 1, 2, 3] and found["names"][1:3] == ["host 0's card 1", "host 1's card 0"]


def test_more_cards_than_fit_are_not_drawn_one_by_one() -> None:
    found = cards_of(read_run(as_trace(ring_all_reduce(18))), hosts(2))
    assert found["names"] == [] and found["per"] == 2 and found["of"] == [r // 2 for r in range(18)]


def test_a_message_is_under_way_until_it_arrives() -> None:
    events = [Event(0, "send", None, 2, chunk=0, step=0), Event(2, "recv", "copy", 0, chunk=0, step=1),
              Event(1, "send", None, 3, chunk=0, step=1), Event(3, "recv", "copy", 1, chunk=0, step=1),
              Event(1, "send", None, 3, chunk=0, step=2)]
    run = read_run(Trace(events, 4, "logical", "recorded"))
    assert [loads(run, step, hosts(2))[0, "out"] for step in range(3)] == [1, 2, 1]


def test_what_the_library_moves_is_not_guessed() -> None:
    events = [Event(r, "hold", chunk=0, step=0, contributions=(1, 0)) for r in (0, 1)]
    events += [Event(r, "collective", "all_reduce", group=(0, 1), step=1) for r in (0, 1)]
    run = read_run(Trace(events, 2, "logical", "recorded"))
    assert cards_in_words(run, hosts(1)) == [""]


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(data=st.data(), per=st.integers(1, 4))
def test_no_message_gets_more_than_is_said(data: st.DataObject, per: int) -> None:
    """The parts of a step's messages as the simulator shares cards, against the number of messages on each card."""
    made = [one for collective in COLLECTIVES.values() for one in collective.schedules(data.draw(st.integers(2, 9)))]
    schedule = data.draw(st.sampled_from(made))
    network, run = hosts(per, data.draw(st.integers(1, per))), read_run(as_trace(schedule))
    for step in range(run.num_steps):
        found = loads(run, step, network) or {}
        src, dst = np.array(sorted({(t.src, t.dst) for t in run.transfers if t.leaves == step})).T
        crosses = network.crossing(src, dst)
        assert sum(num for (_, way), num in found.items() if way == "out") == crosses.sum()
        routes, capacity = network.routes(src, dst, crosses)
        for a, b, pace in zip(src[crosses], dst[crosses], fair(routes, capacity, np.full(len(src), 1.0))[crosses]):
            shared = found[network.card_of(a), "out"], found[network.card_of(b), "in"]
            assert pace <= 1 / max(shared) * (1 + 1e-9)


def test_without_a_network_nothing_is_added() -> None:
    trace = as_trace(ring_all_reduce(4))
    assert "cards" not in run_payload(trace)
    assert run_payload(trace, network=hosts(2)).keys() - run_payload(trace).keys() == {"cards"}


def test_a_reader_without_javascript_is_told_the_load() -> None:
    said = getattr(shown := shared(), "shown", shown).words()
    assert said.count("Two messages at once share each card") == 2 and said.count("No message leaves its host") == 2


def shared(**options: Any) -> Any:
    """A hierarchical all-reduce on two hosts of two ranks."""
    trace = simulate(hierarchical_all_reduce(2, 2), 1e6, Network(2, Link(1e-6, 1e9), Link(1e-3, 1e6)))
    return play(trace, network=hosts(2), **options)


CARDS = """all => all.map(one => {
  const [names, texts, bands] = ['b', 'span', '.lk-band'].map(which => [...one.querySelectorAll(which)]);
  const widths = band => [...band.children].map(part => Math.round(part.getBoundingClientRect().width));
  return [names[0].textContent, texts.map(text => text.textContent.replaceAll('\u00a0', ' ')), bands.map(widths)];
})"""
CARD_ROWS = "[aria-label='Network cards'] > div"


def go_to(page: Any, last: int) -> None:
    """From the start to a stop, step by step."""
    for step in range(1, last + 1):
        press(page, "ArrowRight")
        until(page, step=step, playing="false")


def test_each_card_shows_what_goes_through_it(show: Callable) -> None:
    page = show(shared())
    for step in (0, 1):  # step 1 is inside the hosts
        go_to(page, step)
        assert page.eval_on_selector_all(CARD_ROWS, CARDS) == [
            [f"host {host}'s card, for ranks {2 * host} and {2 * host + 1}", ["out: idle", "in: idle"], [[], []]]
            for host in (0, 1)]
    press(page, "ArrowRight")
    until(page, step=2, playing="false")
    found = page.eval_on_selector_all(CARD_ROWS, CARDS)
    assert [texts for _, texts, _ in found] == [
        ["out: 0 → 2, 1 → 3, 1/2 each at most", "in: 2 → 0, 3 → 1, 1/2 each at most"],
        ["out: 2 → 0, 3 → 1, 1/2 each at most", "in: 0 → 2, 1 → 3, 1/2 each at most"]]
    for *_, bands in found:
        for parts in bands:
            assert len(parts) == 2 and abs(parts[0] - parts[1]) <= 1 and parts[0] > 50, "equal parts of the card"


def test_the_caption_tells_the_load_at_every_stop(show: Callable) -> None:
    said = captions(show(shared()))
    assert ["share each card" in text for text in said] == [False, False, True, True, False]
    assert ["No message leaves its host." in text for text in said] == [False, True, False, False, True]


def test_on_the_clock_a_card_shows_what_is_under_way(show: Callable) -> None:
    """At 1 MB/s the card's messages take nearly all the time, so halfway through both are under way."""
    page = show(shared(clock="time"))
    box = page.locator(".lk-scrub").bounding_box()
    page.mouse.move(box["x"] + box["width"] * 0.4, box["y"] + box["height"] / 2)
    page.mouse.down()
    page.wait_for_function("document.querySelector('[role=group] [role=group] span').textContent.includes('→')")
    page.mouse.up()


# Between which of these marks, one after the other, there is a host's band.
JOINED = """which => {
  const middle = e => { const box = e.getBoundingClientRect(); return [box.x + box.width / 2, box.y + box.height / 2] };
  const places = [...document.querySelectorAll(which)].map(middle);
  return places.slice(1).map(([x, y], i) => document.elementsFromPoint((x + places[i][0]) / 2, (y + places[i][1]) / 2)
    .some(e => e.matches('.lk-host')));
}"""


def test_a_band_joins_the_ranks_of_a_host_in_both_views(show: Callable) -> None:
    page = show(shared())
    assert state(page)["view"] == "ring" and page.evaluate(JOINED, ".lk-card") == [True, False, True]
    click(page, "matrix")
    assert page.evaluate(JOINED, ".lk-stage > svg > circle") == [True, False, True]


def test_a_player_without_a_network_has_no_cards(show: Callable) -> None:
    page = show(play(ring_all_reduce(4)))
    assert page.locator(CARD_ROWS).count() == 0 and page.locator(".lk-host").count() == 0
    assert not page.locator("[aria-label='Network cards']").is_visible()


@pytest.mark.parametrize("width", first(390, 1280))
def test_everything_can_be_read(show: Callable, width: int) -> None:
    runs = {name: simulate(made, 1e6, hosts(4)) for name, made in (
        ("halving", halving_doubling_all_reduce(8)), ("hierarchical", hierarchical_all_reduce(2, 4)),
        ("16 ranks", hierarchical_all_reduce(4, 4)))}
    page = show(play(runs, network=hosts(4)), width=width)
    for name in runs:
        page.get_by_label("run").select_option(label=name)
        press(page, "Home")
        go_to(page, 2)
        assert_readable(page, f"{name} at {width}")
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), (name, width)
    assert page.locator(PLAYER).count() == 1
