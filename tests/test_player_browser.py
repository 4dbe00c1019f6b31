"""The player in a real Chromium, on static pages of its own HTML and assets, with the network blocked."""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist

from book import collectives
from book.collectives import COLLECTIVES
from book.launch import launch
from book.promise import PROMISES
from book.record import lanes, watch
from book.schedule import Schedule
from book.trace import Trace
from book.widgets import play, race
from tests.players import FRAMES, PLAYER, UNREADABLE, assert_readable, click, figures, first, press, state, until
from tests.widget_rows import simulated, wrong_ring

SIZES = [2, 3, 4, 5, 6, 7, 8, 9, 12, 16]


def test_every_control(show: Callable) -> None:
    page = show(play(simulated(collectives.ring_all_reduce, 4)))
    assert state(page)["step"] == "0"
    click(page, "One step forward")
    until(page, step=1, playing="false")
    assert "rank 0 sends chunk 0 to rank 1" in page.inner_text(".lk-caption")
    click(page, "One step forward")
    until(page, step=2, playing="false")
    assert figures(page)["sent per rank, so far"] == "0.50 n"
    click(page, "One step back")
    until(page, step=1)
    press(page, "End", "ArrowLeft")
    click(page, "Play")
    until(page, step=6, playing="false")
    assert figures(page)["chunks complete"] == "16 / 16"
    assert "every rank holds every chunk" in page.inner_text(".lk-caption")
    click(page, "matrix")
    assert state(page)["view"] == "matrix" and page.locator(".lk-stage").count() == 1
    click(page, "ring")
    click(page, "steps")
    assert state(page)["clock"] == "time" and state(page)["step"] == "6"
    click(page, "Back to the start")
    until(page, step=0)


def test_scrubbing_shows_messages_in_flight(show: Callable) -> None:
    page = show(play(collectives.ring_all_reduce(4)))
    box = page.locator(".lk-scrub").bounding_box()
    page.mouse.move(box["x"] + box["width"] * 1.5 / 6, box["y"] + box["height"] / 2)
    page.mouse.down()
    until(page, step=2)
    assert page.locator(".lk-mover").count() == 4
    page.mouse.up()
    assert page.locator(".lk-mover").count() == 0


@pytest.mark.parametrize("name", first(
    *dict.fromkeys(["halving_doubling_all_reduce", "all_to_all", *COLLECTIVES]), num=2))
def test_at_the_end_every_chunk_is_complete(show: Callable, name: str) -> None:
    made = {n: COLLECTIVES[name].schedules(n) for n in (2, 5, 16)}
    schedules = {n: several[len(several) // 2] for n, several in made.items() if several}
    page = show(play(schedules, view="ring"))
    for num_ranks, schedule in schedules.items():
        page.get_by_label("ranks").select_option(label=str(num_ranks))
        page.focus(PLAYER)
        page.keyboard.press("End")
        num_promised = PROMISES[schedule.promise].where(num_ranks, schedule.num_chunks).sum()
        assert figures(page)["chunks complete"] == f"{num_promised} / {num_promised}"
        assert page.locator(".lk-done").count() == 1


def mean_of_all() -> None:
    """In a rank: a message by hand, the library's all-reduce, and a division."""
    dist.init_process_group()
    buffer = lanes(2)
    watch(buffer, 2)
    dist.send(buffer[:4], 1) if dist.get_rank() == 0 else dist.recv(torch.empty(4)) if dist.get_rank() == 1 else None
    dist.all_reduce(buffer)
    buffer /= dist.get_world_size()


@cache
def with_a_librarys_collective() -> Trace:
    """A run of real ranks."""
    return launch(mean_of_all, 4, record=True).trace


@pytest.mark.parametrize("view", ["ring", "matrix"])
def test_a_librarys_collective_changes_the_bars_and_draws_no_messages(show: Callable, view: str) -> None:
    page = show(play(with_a_librarys_collective(), view=view, predict=True))
    page.focus(PLAYER)
    page.keyboard.press("ArrowRight")
    until(page, step=1, playing="false")
    assert page.inner_text(".lk-caption").startswith("Step 1: rank 0 sends chunk 0 to rank 1")
    page.keyboard.press("ArrowRight")
    assert page.evaluate(FRAMES, 6) and page.locator(".lk-mover").count() == 0
    until(page, step=2, playing="false")
    assert page.inner_text(".lk-caption") == (
        "Step 2: All 4 ranks call all_reduce: the library moves the data, and does not tell how. Then all 4 ranks "
        "change their own chunks. Done: every rank holds every chunk complete.")
    assert {what: value for what, value in figures(page).items() if what} == {"steps": "2 / 2", "chunks complete": "8 / 8"}
    assert not page.locator(".lk-bytes").is_visible()


def sum_of_all() -> None:
    """In a rank: the library's all-reduce, and no message by hand."""
    dist.init_process_group()
    size = dist.get_world_size()
    buffer = lanes(size)
    watch(buffer, size)
    dist.all_reduce(buffer)


# The sides of the words in the middle that a card covers.
HIDDEN = """() => {
  const cards = [...document.querySelectorAll('.lk-card')].map(card => card.getBoundingClientRect());
  const words = [...document.querySelectorAll('.lk-mid :is(b, span)')].map(one => one.getBoundingClientRect());
  return words.filter(a => cards.some(b => Math.min(a.right, b.right) - Math.max(a.left, b.left) > 0
    && Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top) > 1)).length;
}"""


@pytest.mark.parametrize("num_ranks", [3, 4])
def test_without_links_the_middle_has_room_for_its_words(show: Callable, num_ranks: int) -> None:
    page = show(play(launch(sum_of_all, num_ranks, record=True).trace))
    for width in (1200, 390):
        page.set_viewport_size({"width": width, "height": 900})
        press(page, "End")
        page.evaluate(FRAMES, 6)
        assert page.inner_text(".lk-mid span").startswith("all-reduce") and not page.evaluate(HIDDEN), width


def test_keys_in_a_select_do_not_move_the_player(show: Callable) -> None:
    page = show(play({n: collectives.ring_all_reduce(n) for n in range(2, 17)}))
    page.get_by_label("ranks").focus()
    page.keyboard.press("ArrowRight")
    assert state(page)["step"] == "0"
    page.get_by_label("ranks").select_option(label="16")
    until(page, ranks=16, view="matrix")
    page.get_by_label("ranks").select_option(label="5")
    until(page, ranks=5, view="ring")


def test_a_prediction_is_judged(show: Callable) -> None:
    page = show(play(collectives.ring_all_reduce(4), predict=True), reduced_motion="reduce")
    for step in range(6):
        right = "true" if step != 1 else "false"
        page.locator(f".lk-options [data-right={right}]").first.focus()
        page.keyboard.press("Enter")
        until(page, step=step + 1, playing="false")
        said = page.inner_text(".lk-quiz [role=status]")
        assert said.startswith(f"Step {step + 1}: {'right' if step != 1 else 'no'}, "), said
        assert said.endswith(f"{step + 1 - (step >= 1)} of {step + 1} right.")
    assert "last step" in page.inner_text(".lk-quiz")
    click(page, "predict")
    assert page.locator(".lk-quiz").is_hidden()


def test_play_waits_for_a_prediction(show: Callable) -> None:
    page = show(play(collectives.ring_all_reduce(4), predict=True))
    click(page, "Play")
    until(page, step=1, playing="false")
    assert page.locator(".lk-options button").count() > 1


def test_a_wrong_run_looks_wrong(show: Callable) -> None:
    page = show(play(wrong_ring()))
    page.focus(PLAYER)
    page.keyboard.press("End")
    assert "Wrong at the end: 4 of 16 chunks are complete" in page.inner_text(".lk-caption .lk-wrong")
    assert figures(page)["chunks complete"] == "4 / 16"
    assert [page.locator(".lk-num", has_text=text).count() for text in ("×2", "×3")] == [4, 4]
    assert page.locator(".lk-card .lk-hatch").count() >= 8


def test_unknown_is_shown_as_unknown(show: Callable) -> None:
    trace = simulated(collectives.ring_all_reduce, 4)
    events = [replace(e, contributions=None) if e.kind == "recv" and e.step == 2 else e for e in trace.events]
    page = show(play(Trace(events, 4, "modelled", "recorded")), reduced_motion="reduce")
    press(page, "Home", *["ArrowRight"] * 3)
    until(page, step=3, playing="false")
    assert page.locator(".lk-card .bad", has_text="?").count() == 4
    assert "recorded from a run on 4 ranks" in page.inner_text(".lk-head")


def test_a_straggler_takes_longer(show: Callable) -> None:
    runs = {"even": simulated(collectives.ring_all_reduce, 4),
            "rank 2 is slow": simulated(collectives.ring_all_reduce, 4, slowdown={2: 3.0})}
    page = show(play(runs, clock="time", labels=["links"]))
    ends = []
    for choice in runs:
        page.get_by_label("links").select_option(label=choice)
        page.focus(PLAYER)
        page.keyboard.press("End")
        ends.append(page.locator(".lk-mid span").last.inner_text())
    assert ends == ["600 ms", "1.80 s"]


def test_the_race_has_one_clock(show: Callable) -> None:
    makes = {"ring": collectives.ring_all_reduce, "parameter server": collectives.parameter_server_all_reduce,
             "tree": collectives.tree_all_reduce}
    page = show(race({name: simulated(make, 4) for name, make in makes.items()}))
    assert page.inner_text(".lk-head span").endswith("· 0 s")
    assert page.locator(".lk-lane p").all_inner_texts() == ["under way"] * 3, "a reader guesses first"
    page.focus(PLAYER)
    page.keyboard.press("End")
    texts = page.locator(".lk-lane p").all_inner_texts()
    assert texts == ["done after 600 ms · busiest link, out of rank 0: 1.50 n",
                     "done after 2.40 s · busiest link, out of rank 0: 3.00 n",
                     "done after 1.60 s · busiest link, out of rank 0: 2.00 n"]
    caption = page.inner_text(".lk-caption")
    assert caption == "Done: ring after 600 ms, tree after 1.60 s and parameter server after 2.40 s."


# Cards that cover one another, travelling bars that cover a card, and how many bars there are.
COVERED = """() => {
  const box = e => [e.dataset.rank ?? 'bar', e.getBoundingClientRect()];
  const boxes = name => [...document.querySelectorAll(name)].map(box);
  const cards = boxes('.lk-card'), bars = boxes('.lk-mover'), found = [];
  [...cards, ...bars].forEach(([name, a], i) => cards.slice(i < cards.length ? i + 1 : 0).forEach(([other, b]) => {
    const x = Math.min(a.right, b.right) - Math.max(a.left, b.left);
    const y = Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top);
    if (Math.min(x, y) > 0.5) found.push([name, other, x, y]);
  }));
  return [cards.length, bars.length, found];
}"""
# Holds the scrubber at shares of the run, as a pointer that is down does; what covers what at each, and which text.
HOLD = f"""shares => shares.map(share => {{
  const scrub = document.querySelector('.lk-scrub'), box = scrub.getBoundingClientRect();
  const at = {{ clientX: box.left + box.width * share, clientY: box.y + 17, buttons: 1, bubbles: true }};
  scrub.setPointerCapture = () => {{}};
  scrub.dispatchEvent(new PointerEvent('pointerdown', at));
  const found = [...({COVERED})(), ...({UNREADABLE})()];
  scrub.dispatchEvent(new PointerEvent('pointerup', at));
  return found;
}})"""


def assert_apart(page: Any, num_ranks: int, shares: list[float], least: int) -> None:
    """No card covers another, no travelling bar covers a card, and at least so many travel; all texts can be read."""
    for num_cards, num_bars, covered, num_texts, unreadable in page.evaluate(HOLD, shares):
        assert num_cards >= num_ranks and num_bars >= least and num_texts
        assert not covered and not unreadable, (num_ranks, covered, unreadable)
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


@pytest.mark.parametrize("width", first(390, 720))
def test_nothing_overlaps_from_2_to_16_ranks(show: Callable, width: int) -> None:
    page = show(play({n: collectives.ring_all_reduce(n) for n in SIZES}, view="ring"), width=width, height=1300)
    for num_ranks in SIZES:
        page.get_by_label("ranks").select_option(label=str(num_ranks))
        until(page, ranks=num_ranks, view="ring")
        assert_apart(page, num_ranks, [(num_ranks - 2 + f) / (2 * num_ranks - 2) for f in (0.25, 0.5, 0.75)], num_ranks)
        click(page, "matrix")
        assert_readable(page, f"matrix of {num_ranks} ranks at {width} px")
        click(page, "ring")


@pytest.mark.parametrize("width", first(390, 720))
@pytest.mark.parametrize("make", [collectives.tree_all_reduce, collectives.parameter_server_all_reduce])
def test_stars_and_trees_have_room(show: Callable, make: Callable[[int], Schedule], width: int) -> None:
    page = show(play({n: make(n) for n in SIZES}, view="ring"), width=width, height=1600)
    for num_ranks in SIZES:
        page.get_by_label("ranks").select_option(label=str(num_ranks))
        until(page, ranks=num_ranks)
        assert_apart(page, num_ranks, [0.5 / make(num_ranks).num_steps], 1)


def test_the_selector_shows_the_run_that_it_opens_with(show: Callable) -> None:
    page = show(play({n: collectives.ring_all_reduce(n) for n in (2, 3, 4)}, select=4))
    assert page.locator(PLAYER).get_attribute("data-ranks") == "4"
    assert page.get_by_label("ranks").evaluate("s => s.selectedOptions[0].text") == "4"


def test_on_a_phone_the_controls_stay_in_view(show: Callable) -> None:
    """Wherever the page stands, as long as the player is on it, and they are large enough for a finger."""
    page = show(play(collectives.ring_all_reduce(8)), race({name: simulated(make, 4) for name, make in (
        ("ring", collectives.ring_all_reduce), ("tree", collectives.tree_all_reduce))}), width=390, height=600)
    assert page.locator(PLAYER).first.bounding_box()["height"] > 600
    controls = page.locator(".lk-play").first
    for scrolled in (0, 60):
        page.evaluate("y => scrollTo(0, y)", scrolled)
        box = controls.bounding_box()
        assert 300 < box["y"] and box["y"] + box["height"] <= 600
    small = page.eval_on_selector_all(".lockstep-player :is(button, select, .lk-scrub, summary)", """all => all
        .map(e => [e.title || e.className, (e.closest('label') || e).getBoundingClientRect()])
        .filter(([, box]) => box.height && Math.min(box.width, box.height) < 44).map(([name]) => name)""")
    assert not small
    lanes = [lane.bounding_box() for lane in page.locator(".lk-lane").all()]
    assert lanes[0]["y"] == lanes[1]["y"], "two runs of a race stand side by side"
