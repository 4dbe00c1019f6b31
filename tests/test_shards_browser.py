"""The sharded product in a real Chromium, on static pages of real runs' HTML and assets, with the network blocked."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from book.widgets import sharded_product
from tests.players import caption, captions, click, figures, press, scrub, state, until
from tests.shards import recorded
from tests.widget_rows import product

CELL = ".lk-cell >> nth={}"


def labels(page: Any, rank: int = 0) -> list[str]:
    """What stands below a rank's matrices."""
    texts = page.eval_on_selector_all(".lk-cell text", "all => all.map(e => e.textContent)")
    each = len(texts) // int(state(page)["ranks"])
    return texts[rank * each:(rank + 1) * each]


def fills(page: Any, cell: int) -> list[str]:
    """The colours in a place, by their CSS variables, left to right and top to bottom."""
    return page.eval_on_selector(CELL.format(cell), "g => [...g.querySelectorAll(':scope > g > rect')].map(r => "
                                                    "r.getAttribute('fill') || r.getAttribute('class'))")


def detail(page: Any) -> str:
    return page.inner_text(".lk-detail")


def test_each_stop_is_described(show: Callable) -> None:
    page = show(product("by rows"), reduced_motion="reduce")
    assert captions(page) == [
        "Y = X A on 2 ranks. Every rank holds its columns of X and its rows of A.",
        "Every rank multiplies its columns of X by its rows of A: a partial sum of all of Y (1 of 2 terms).",
        "All-reduce of Y: what the ranks have is added up, and every rank gets the sum. Every rank now has all of Y, "
        "complete.",
        "Done: every rank returns all of Y, complete."]
    shown = {meaning.replace("\u00a0", " "): value.replace("\u00a0", " ") for meaning, value in figures(page).items()}
    assert shown == {"of A on each rank, 1/2 of 4.61 kB": "2.30 kB",
                     "multiplications on each rank, 1/2 of one process's": "6,912",
                     "sent by each rank: 2(t−1)/t·n, n = 9.22 kB, t = 2": "9.22 kB", "all-reduce": "1",
                     "of Y on each rank at the end, all": "9.22 kB"}
    assert page.inner_text(".lk-head span") == "recorded from 2 processes"


def test_blocks_have_the_colour_of_their_part(show: Callable) -> None:
    page = show(product("by rows"), reduced_motion="reduce")
    assert [fills(page, i) for i in range(6)] == [["var(--r0)"], ["var(--r0)"], [], ["var(--r1)"], ["var(--r1)"], []]
    press(page, "ArrowRight")
    assert fills(page, 2) == ["var(--r0)"] and fills(page, 5) == ["var(--r1)"]
    assert labels(page) == ["24×6", "6×48", "1/2 terms"]
    page.keyboard.press("ArrowRight")
    assert fills(page, 2) == fills(page, 5) == ["var(--r0)", "var(--r1)"]
    assert labels(page, 1)[2] == "2/2 terms" and page.locator(".lk-cell text.done").count() == 2
    boxes = page.eval_on_selector_all(".lk-cell", """all => all.slice(0, 2).map(
        g => [g.querySelector('.lk-hull'), g.querySelector(':scope > g > rect')]
            .map(r => r.getBBox()).map(b => [b.width, b.height]))""")
    for (width, height), axis in zip([pair[1] for pair in boxes], (0, 1)):
        hull = boxes[axis][0]
        assert (width, height)[axis] < 0.5 * hull[axis], "half of X's columns, half of A's rows"


@pytest.mark.parametrize("name, label, bad", [("twice", "×2", True), ("partial", "1/2 terms", False),
                                              ("columns summed", "24×24 ?", True), ("bias", "2/2 + 2b", True)])
def test_a_mistake_is_drawn_as_an_error(show: Callable, name: str, label: str, bad: bool) -> None:
    page = show(product(name))
    press(page, "End")
    assert labels(page)[2] == label and caption(page).startswith("Wrong: every rank returns")
    assert page.locator(".lk-caption .lk-wrong").count() == 1
    assert page.locator(".lk-cell text.bad").count() == 2 * bad and page.locator(".lk-cell text.done").count() == 0
    assert (page.locator(".lk-hatch").count() > 0) == (name in ("twice", "bias"))
    assert (page.locator(".lk-blank").count() > 0) == (name == "columns summed")


def test_blocks_move_while_a_collective_runs(show: Callable) -> None:
    page = show(product("by rows", 4))
    press(page, "ArrowRight")
    until(page, step=1, playing="false")
    page.evaluate("""() => { window.seen = new Set(); new MutationObserver(() => document.querySelectorAll(
        '.lk-move g').forEach(g => seen.add(g.getAttribute('transform')))).observe(document.body,
        {subtree: true, attributes: true}) }""")
    page.keyboard.press("ArrowRight")
    until(page, step=2, playing="false")
    assert page.locator(".lk-move g").count() == 12, "each of 4 ranks to each other"
    assert page.evaluate("seen.size") > 24 and page.locator(".lk-wire").count() == 1
    assert page.locator(".lk-move").evaluate("e => e.style.visibility") == "hidden"
    click(page, "One step forward")
    until(page, step=3)
    assert page.locator(".lk-wire").count() == 0


def test_scrubbing_goes_to_a_stop(show: Callable) -> None:
    page = show(product("by rows"))
    scrub(page, 0.64)
    until(page, step=2)
    assert page.get_by_role("slider").get_attribute("aria-valuetext").startswith("All-reduce of Y: ")


def test_a_block_says_what_it_is(show: Callable) -> None:
    page = show(product("by rows"), reduced_motion="reduce", has_touch=True)
    press(page, "ArrowRight")
    assert detail(page) == "Y on rank 0 = X A: all 24 rows, all 48 columns of 24×48, 9.22 kB; 1 of 2 terms, of part 0."
    page.locator(CELL.format(4)).hover()
    assert detail(page) == "A on rank 1: rows 6 to 11, all 48 columns of 12×48, 2.30 kB."
    assert page.locator(".lk-cell.on").count() == 1
    page.mouse.move(2, 2)
    assert detail(page).startswith("Y on rank 0") and page.locator(".lk-cell.on").count() == 0
    page.locator(CELL.format(3)).tap()
    assert detail(page) == "X on rank 1: all 24 rows, columns 6 to 11 of 24×12, 1.15 kB."
    assert page.locator(CELL.format(5)).get_attribute("aria-label") == (
        "Y on rank 1 = X A: all 24 rows, all 48 columns of 24×48, 9.22 kB; 1 of 2 terms, of part 1.")


def test_the_line_below_says_what_is_drawn_while_a_step_plays(show: Callable) -> None:
    page = show(product("by rows"))
    page.evaluate("""() => { window.seen = []; window.wrong = []; new MutationObserver(() => {
        const line = document.querySelector('.lk-detail').textContent; seen.push(line);
        const cells = [...document.querySelectorAll('.lk-cell')].map(g => g.ariaLabel);
        if (!cells.includes(line)) wrong.push(line) }).observe(document.body,
        {subtree: true, attributes: true, childList: true}) }""")
    press(page, "ArrowRight")
    until(page, step=1, playing="false")
    assert page.evaluate("new Set(seen).size") > 1 and page.evaluate("wrong") == []


def test_a_doubled_bias_is_in_its_words(show: Callable) -> None:
    page = show(product("bias"))
    press(page, "End")
    assert detail(page).endswith("all 2 terms, the bias ×2.")


def test_blocks_by_keyboard(show: Callable) -> None:
    page = show(product("MLP, backward", 4), reduced_motion="reduce")
    press(page, "ArrowDown", "ArrowDown")
    assert detail(page) == "A on rank 0: all 12 rows, columns 0 to 11 of 12×48, 1.15 kB."
    for _ in range(9):
        page.keyboard.press("ArrowDown")
    assert page.evaluate("document.activeElement.ariaLabel").startswith("X on rank 1")
    page.keyboard.press("ArrowUp")
    assert detail(page) == "dY on rank 0: nothing yet."
    page.keyboard.press("ArrowRight")
    until(page, step=1)
    assert page.locator(".lk-stage [tabindex='0']").count() == 1, "one stop for the Tab key"


def test_later_blocks_replace_earlier_ones(show: Callable) -> None:
    page = show(product("MLP"), reduced_motion="reduce")
    press(page, "ArrowRight")
    assert labels(page)[2] == "P 24×24"
    page.keyboard.press("ArrowRight")
    assert labels(page)[2] == "24×24" and fills(page, 2) == ["var(--r0)"]
    assert page.locator(".lk-cell text").nth(2).inner_html() == "24×24"


def test_a_reduce_scatter_leaves_a_rank_its_part(show: Callable) -> None:
    page = show(product("sequence parallel"), reduced_motion="reduce")
    press(page, *["ArrowRight"] * 4)
    assert caption(page).startswith("Every rank multiplies its columns of H") and len(fills(page, 4)) == 2
    page.keyboard.press("ArrowRight")
    assert caption(page).startswith("Reduce-scatter of Y") and fills(page, 4) == ["var(--r0)", "var(--r1)"]
    assert labels(page)[4] == "2/2 terms"


def test_another_run_starts_over_unless_the_last_one_had_ended(show: Callable) -> None:
    runs = {(name, n): recorded(name, n) for name in ("by rows", "by columns") for n in (2, 4)}
    page = show(sharded_product(runs, labels=["cut", "ranks"]), reduced_motion="reduce")
    press(page, "ArrowRight")
    page.get_by_label("ranks").select_option(label="4")
    assert state(page)["step"] == "0" and state(page)["ranks"] == "4"
    press(page, "End")
    page.get_by_label("cut").select_option(label="by columns")
    assert caption(page).startswith("Done: every rank returns its columns")
    assert page.locator(".lk-cell").count() == 12
