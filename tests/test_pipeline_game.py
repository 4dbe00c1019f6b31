"""The pipeline game: its rules are those of the package, in JavaScript; the game itself in a real Chromium."""
from __future__ import annotations

import html
import json
import random
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from book.pipelines import gpipe, one_f_one_b
from book.replay import bubble
from book.schedule import Action, PipelineSchedule, ScheduleError
from book.simulate import simulate_pipeline
from book.widgets import pipeline_game
from tests.players import assert_readable, caption, click, press, state

Move = tuple[int, str, int]  # rank, kind, micro-batch
RULES = """([data, orders]) => orders.map(order => {
  const { refusal, timed, scored } = globalThis.lockstep.game, placed = [], said = [];
  for (const [r, kind, m] of order) {
    const why = refusal(data, placed, { r, kind, m });
    said.push(why);
    if (!why) placed.push({ r, kind, m });
  }
  const acts = timed(data, placed);
  return { said, times: acts.map(x => [x.a, x.z]), ...scored(data, acts) };
})"""


def data_of(shown: Any) -> dict[str, Any]:
    return json.loads(html.unescape(re.match(r"<div data-lockstep-game='([^']*)'>", shown.shown.html())[1]))


def schedule_of(moves: list[Move], num_stages: int, num_micro_batches: int) -> PipelineSchedule:
    return PipelineSchedule("placed", num_stages, num_micro_batches,
                            [Action(rank, rank, m, kind) for rank, kind, m in moves], num_stages)


def refusal(moves: list[Move], num_stages: int, num_micro_batches: int) -> str:
    """What Python says of an order whose last action is new; "" where it can run."""
    try:
        list(schedule_of(moves, num_stages, num_micro_batches).runnable())
    except ScheduleError as error:
        return str(error).removeprefix("placed: ").removeprefix("this order cannot run: ")
    return ""


def attempts(draw: random.Random, num_stages: int, num_micro_batches: int) -> Iterator[Move]:
    """Moves of a player who tries things, and now and then what was done already."""
    every = [(rank, kind, m) for rank in range(num_stages) for kind in "FB" for m in range(num_micro_batches)]
    for _ in range(draw.choice((1, 4, 12))):
        yield from draw.sample(every, len(every))


def test_the_rules_are_those_of_the_package(show: Callable) -> None:
    """Many orders, legal and illegal: the same refusals in the same words, times, bubble and activations."""
    draw, page = random.Random(4), show(pipeline_game(2, 2))
    for num_stages, num_micro_batches in ((1, 2), (2, 3), (3, 2), (4, 4), (3, 5)):
        data = {**data_of(pipeline_game(num_stages, num_micro_batches)), "forward_s": 3e-3, "backward_s": 7e-3}
        orders = [list(attempts(draw, num_stages, num_micro_batches)) for _ in range(12)]
        found = page.evaluate(RULES, [data, orders])
        for order, game in zip(orders, found):
            placed: list[Move] = []
            for move, said in zip(order, game["said"]):
                assert said == refusal([*placed, move], num_stages, num_micro_batches)
                placed.extend([] if said else [move])
            schedule = schedule_of(placed, num_stages, num_micro_batches)
            trace = simulate_pipeline(schedule, 3e-3, 7e-3)
            times = {(e.rank, e.op, e.micro_batch): [e.start_s, e.end_s] for e in trace.events}
            assert game["times"] == [pytest.approx(times[move]) for move in placed]
            assert game["peaks"] == schedule.peak_in_flight()
            if placed:
                assert (game["step_s"], game["share"]) == pytest.approx((bubble(trace).step_s, bubble(trace).share))
            complete = len(placed) == 2 * num_stages * num_micro_batches
            assert game["done"] == complete and (not complete or schedule.check() is schedule)
        assert any(game["done"] for game in found)


def place(page: Any, rank: int, kind: str, micro_batch: int) -> None:
    """Choose the rank and click the action."""
    group = page.get_by_role("group", name="rank", exact=True)
    if group.locator(".on").inner_text() != str(rank):
        group.get_by_role("button", name=str(rank), exact=True).click()
    page.locator(".lk-board").get_by_role("button", name=f"{kind}{micro_batch}", exact=True).click()


def place_all(page: Any, schedule: PipelineSchedule) -> None:
    for action in schedule.runnable():
        place(page, action.rank, action.kind, action.micro_batch)


def score(page: Any) -> dict[str, list[str]]:
    """The table's rows: what each is called, then step, bubble, most in flight."""
    rows = page.eval_on_selector_all(".lk-score tr", "all => all.map(tr => [...tr.children].map(e => e.textContent))")
    return {name: cells for name, *cells in rows[1:]}


@pytest.mark.parametrize(("make", "name", "peaks"), [
    (one_f_one_b, "1F1B", "3, 2, 1"), (gpipe, "GPipe", "3, 3, 3")])
def test_a_known_order_is_recognized(show: Callable, make: Callable, name: str, peaks: str) -> None:
    """Placed action by action, it scores as what it is; with 3 micro-batches on 3 ranks its bubble is 2/5."""
    page = show(pipeline_game(3, 3))
    place_all(page, make(3, 3))
    assert caption(page).endswith(f"Done after 15 ms: this is {name}.")
    assert score(page)["yours"] == score(page)[name] == ["15 ms", "40.0 %", peaks]
    assert state(page)["done"] == "true"


def test_another_order_is_compared(show: Callable) -> None:
    page = show(pipeline_game(2, 2))
    for m in range(2):  # one micro-batch after the other
        for rank, kind in ((0, "F"), (1, "F"), (1, "B"), (0, "B")):
            place(page, rank, kind, m)
    assert caption(page).endswith("Done after 12 ms, 33 % longer than 1F1B; at most 1 in flight, 1F1B has 2.")
    assert score(page)["yours"] == ["12 ms", "50.0 %", "1, 1"]
    click(page, "Undo")
    assert score(page)["yours"] == ["10 ms", "7 of 8 placed", "1, 1"]


def test_an_invalid_placement_is_explained_and_changes_nothing(show: Callable) -> None:
    page = show(pipeline_game(3, 2))
    place(page, 0, "F", 0)
    for move, why in (((0, "B", 0), "rank 0 waits at B0 of stage 0 for the backward of micro-batch 0 on stage 1"),
                      ((0, "F", 0), "rank 0 runs F0 of stage 0 when that was done already"),
                      ((1, "F", 1), "rank 1 waits at F1 of stage 1 for F1 of stage 0"),
                      ((2, "B", 0), "rank 2 waits at B0 of stage 2 for F0 of stage 2")):
        place(page, *move)
        assert caption(page) == f"Not possible: {why}."
        assert state(page)["placed"] == "0F0" and page.locator(".lk-caption .lk-wrong").count() == 1
    place(page, 1, "F", 0)
    assert caption(page) == "F0 runs on rank 1 from 1 ms to 2 ms; the rank is idle for 1 ms before."


def test_buttons_say_what_they_would_do(show: Callable) -> None:
    page = show(pipeline_game(2, 2))
    place(page, 0, "F", 1)
    titles = page.eval_on_selector_all(".lk-board .lk-pill[title*=' on rank ']", "all => all.map(e => e.title)")
    assert titles == ["F0 on rank 0: can run", "F1 on rank 0: placed", "B0 on rank 0: not yet", "B1 on rank 0: not yet"]
    assert page.locator(".lk-move .lk-block").text_content() == "F1"


def test_by_keyboard_alone(show: Callable) -> None:
    page = show(pipeline_game(2, 2))
    page.evaluate("document.addEventListener('keydown', e => { window.leaked = (window.leaked || '') + e.key })")
    press(page, *"ff", "ArrowDown", *"fbfb", "ArrowUp", *"bb")
    assert "this is GPipe" not in caption(page) and caption(page).endswith("Done after 9 ms: this is 1F1B.")
    press(page, "u", "Backspace")
    assert state(page)["placed"] == "0F0,0F1,1F0,1B0,1F1,1B1"
    press(page, "b", "b", "f")
    assert caption(page) == "Not possible: rank 0 runs F1 of stage 0 when that was done already."
    assert page.evaluate("window.leaked") is None


def test_by_touch(show: Callable) -> None:
    page = show(pipeline_game(2, 2), width=390, has_touch=True)
    lane = page.locator(".lk-stage svg > rect").nth(1)
    box = lane.bounding_box()
    page.locator(".lk-board").get_by_role("button", name="F0").tap()
    page.touchscreen.tap(box["x"] + box["width"] - 20, box["y"] + box["height"] / 2)
    assert state(page)["rank"] == "1"
    page.locator(".lk-board").get_by_role("button", name="F0").tap()
    assert state(page)["placed"] == "0F0,1F0"


def test_undo_and_restart(show: Callable) -> None:
    page = show(pipeline_game(2, 2))
    press(page, *"ff")
    click(page, "Restart")
    assert state(page)["placed"] == "" and score(page)["yours"] == ["0 s", "0 of 8 placed", "0, 0"]
    click(page, "Undo")
    assert state(page)["placed"] == "0F0,0F1"
    for _ in range(4):
        click(page, "Undo")
    assert state(page)["placed"] == ""


def test_placed_actions_can_be_played(show: Callable) -> None:
    page = show(pipeline_game(2, 2), reduced_motion="reduce")
    place_all(page, gpipe(2, 2))
    assert "this is GPipe" in caption(page) and state(page)["step"] == state(page)["steps"]
    press(page, "Home", "ArrowRight")
    assert state(page)["step"] == "1"
    assert page.eval_on_selector_all("g.in text", "all => all.map(e => e.textContent)") == ["0"]


def test_a_game_survives_a_change_of_theme_and_width(show: Callable) -> None:
    page = show(pipeline_game(2, 2))
    press(page, "f", "f")
    page.evaluate("document.documentElement.dataset.theme = 'dark'")
    page.set_viewport_size({"width": 420, "height": 900})
    page.wait_for_function("document.querySelector('.lk-stage').clientWidth < 420")
    assert state(page)["placed"] == "0F0,0F1" and page.locator(".lk-move .lk-block").count() == 2
    press(page, "u")
    assert state(page)["placed"] == "0F0"


@pytest.mark.parametrize("width", [760, 390, 320])
def test_nothing_overlaps_and_nothing_moves(show: Callable, width: int) -> None:
    game, places = pipeline_game(4, 8), set()
    page = show(game, width=width, height=1500, reduced_motion="reduce")
    order = [[action.stage, action.kind, action.micro_batch] for action in one_f_one_b(4, 8).runnable()]
    for k in (0, 6, 30, len(order) - 1):
        page.evaluate(REMOUNT, {**data_of(game), "placed": order[:k]})
        press(page, "f" if k == 30 else "b")  # a refusal in the middle, the last backward at the end
        assert_readable(page, f"{width} px, {k}")
        places.add(round(page.locator(".lk-board").bounding_box()["y"]))
    assert caption(page).endswith("this is 1F1B.")
    assert len(places) == 1 and page.evaluate("document.documentElement.scrollWidth") <= width


REMOUNT = """data => {
  const el = document.querySelector('main'); el.replaceChildren(); globalThis.lockstepGame.mount(el, data) }"""
LIVE = """payload => { const traits = { payload, placed: '[[0,"F",0]]', step: 0, playing: false, error: "" };
  const model = { get: k => traits[k], set: (k, v) => { traits[k] = v }, save_changes() {}, on() {}, off() {} };
  const el = document.querySelector('main'); el.replaceChildren();
  globalThis.lockstepGame.render({ model, el }); globalThis.traits = traits; }"""


def test_a_live_game_gives_python_the_schedule(show: Callable) -> None:
    """A view that opens later shows what was placed, and what it places reaches Python."""
    game = pipeline_game(2, 2)
    page = show(game)
    page.evaluate(LIVE, game.payload)
    press(page, "f")
    game.placed = page.evaluate("traits.placed")
    assert game.placed == '[[0,"F",0],[0,"F",1]]'
    assert game.schedule.of_rank(0) == [Action(0, 0, 0, "F"), Action(0, 0, 1, "F")]
    assert game.schedule.peak_in_flight() == [2, 0] and game.trace.duration_s == pytest.approx(2e-3)
    press(page, "ArrowDown", *"fbfb", "ArrowUp", *"bb")
    game.placed = page.evaluate("traits.placed")
    assert game.schedule.check().actions == one_f_one_b(2, 2).actions


def test_a_reader_without_javascript_gets_the_rules(show: Callable) -> None:
    game = pipeline_game(4, 4)
    page = show(game, wait=False, java_script_enabled=False)
    assert "1F1B: 21 ms · bubble 42.9 % · at most 4 in flight" in page.inner_text("main")
    assert str(pipeline_game(4, 4)) == ("Place the forwards and backwards yourself: pipeline game, 4 stages, 4 "
                                        "micro-batches, modelled · B = 2F")


@pytest.mark.parametrize("sizes, message", [
    ((0, 4), "num_stages must be a whole number of at least 1"), ((9, 4), "up to 8 stages and 16 micro-batches"),
    ((4, 17), "not 4 and 17")])
def test_an_invalid_game_raises_a_clear_error(sizes: tuple[int, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        pipeline_game(*sizes)
    with pytest.raises(TypeError, match="use pipeline_player to show a trace"):
        pipeline_game(2, 2).trace = gpipe(2, 2)
