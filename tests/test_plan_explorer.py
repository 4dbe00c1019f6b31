"""The planner in the page: the answer of plan() and of the command, dials that change it, and impossible choices."""
from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

from book.cost import plan
from book.cost.__main__ import main
from book.widgets import plan_explorer
from tests.players import (PLAYER, assert_readable, axe_finds, caption, click, figures, first, html_of, paint, state)
from tests.test_explorers import PICTURE, data_of, turn

READS = ["book/twin/*.js", "book/widgets/*explorer*", "book/widgets/layouts.js", "book/widgets/scene.js",
         "book/widgets/widgets.css", "book/cost/*.py"]
CHOSEN = ("pp", "dp", "tp", "cp", "ep", "micro_batch_size", "stages_per_rank", "zero_stage", "sequence_parallel")


def places(label: str) -> list[Any]:
    """The values of a dial."""
    [dial] = [dial for dial in data_of(plan_explorer())["dials"] if dial["label"] == label]
    return dial["values"]


def assert_answers(page: Any, **question: Any) -> None:
    """The page has the layout, seconds, memory and error bar of plan(...)."""
    found, said = plan(**question), state(page)
    assert {name: said[name] for name in CHOSEN} == {name: str(getattr(found.layout, name)) for name in CHOSEN}
    assert said["recompute"] == str(found.layout.recompute or "null")
    assert float(said["step_s"]) == pytest.approx(found.cost.step_s, rel=1e-11)
    assert float(said["memory"]) == pytest.approx(found.cost.memory_bytes, rel=1e-11)
    words = caption(page).replace("\u00a0", " ")
    assert words.startswith(f"{found.layout}: ")
    bar = re.findall(r"([\d.]+) (m?)s", words.partition("would take")[2])
    assert [float(number) / (1000 if milli else 1) for number, milli in bar] == pytest.approx(
        [found.low_s, found.high_s, found.worst_s], rel=5e-3)


@pytest.mark.slow
def test_page_command_and_notebook_give_the_same_answer(show: Callable, capsys: Any) -> None:
    """64 H100s, a Llama of 70 billion."""
    page = show(plan_explorer())
    assert_answers(page, model="llama3-70b", gpus=64, gpu="H100")
    assert main(["plan", "llama3-70b", "--gpus", "64", "--gpu", "H100", "--tokens", "2e12", "--price", "2.5"]) == 0
    told = capsys.readouterr().out
    found = plan("llama3-70b", 64, "H100", 2e12, 2.5)
    assert told == f"{found}\n" and f"layout   {found.layout}\n" in told
    texts = page.inner_text(PLAYER).replace("\u00a0", " ")
    for words in (f"${found.dollars:,.0f}", f"{found.gpu_hours:,.0f}", f"MFU {100 * found.cost.mfu:.0f} %",
                  f"{found.search.fits.sum()} of {len(found.search):,} layouts fit"):
        assert words in texts
    for line in told.splitlines():
        assert line.strip().replace("&", "&amp;").replace("'", "&#x27;") in html_of(plan_explorer())


@pytest.mark.slow
def test_other_models_and_gpus_are_answered_as_plan_does(show: Callable) -> None:
    page = show(plan_explorer())
    turn(page, "GPU", places("GPU").index("GB200"))
    turn(page, "GPUs", places("GPUs").index(512))
    for name in ("mixtral-8x7b", "deepseek-v3", "gpt3"):
        turn(page, "model", places("model").index(name))
        assert_answers(page, model=name, gpus=512, gpu="GB200")


def test_a_gpu_brings_its_memory_and_network_along(show: Callable) -> None:
    page = show(plan_explorer())
    turn(page, "memory", places("memory").index(120e9))
    turn(page, "GPU", places("GPU").index("A100-40"))
    assert (float(state(page)["memory_bytes"]), float(state(page)["across_bytes_per_s"])) == (40e9, 25e9)
    click(page, "Reset")
    assert (float(state(page)["memory_bytes"]), float(state(page)["across_bytes_per_s"])) == (80e9, 50e9)


def test_each_dial_changes_the_answer(show: Callable) -> None:
    page = show(plan_explorer())
    before = caption(page), figures(page)
    for label, to in (("GPUs", 9), ("memory", 1), ("network", 0), ("batch", 6), ("GPU hour", 0), ("model", 0),
                      ("GPU", 0)):
        turn(page, label, to)
        assert (caption(page), figures(page)) != before, label
        click(page, "Reset")
        assert (caption(page), figures(page)) == before, label
    turn(page, "network", 0)
    assert page.locator(".lk-curve").count() == 2, "the front of before stays"


def test_what_does_not_fit_is_said_with_what_it_would_need(show: Callable) -> None:
    page = show(plan_explorer())
    turn(page, "GPUs", 0)
    with pytest.raises(ValueError) as caught:
        plan("llama3-70b", 8, "H100")
    total, least, usable = re.findall(r"none of (\d+) layouts fits: the smallest needs ([\d.]+) GB on each GPU, and "
                                      r"([\d.]+) GB", str(caught.value))[0]
    words = caption(page).replace("\u00a0", " ")
    assert f"none of {int(total):,} layouts fits: the smallest needs {least} GB, and {usable} GB are usable" in words
    assert state(page)["step_s"] == "" and "–" in page.inner_text(".lk-foot")


def test_a_name_that_is_not_there_is_refused() -> None:
    for change, words in (({"model": "llama5"}, "no model is called"), ({"gpu": "H10"}, "no GPU is called"),
                          ({"gpus": 0}, "gpus must be a whole number above 0")):
        with pytest.raises(ValueError, match=words):
            plan_explorer(**change)


def test_its_data_are_light_and_the_same_each_time() -> None:
    assert html_of(plan_explorer()) == html_of(plan_explorer())
    payload = re.match(r"<div data-lockstep-plan_explorer='([^']*)'", html_of(plan_explorer()))
    assert payload and len(payload[1].encode()) < 60_000


@pytest.mark.slow
@pytest.mark.parametrize("view", first("390 dark", "320 light", "1280 light", "1280 dark"))
def test_all_texts_can_be_read(show: Callable, view: str) -> None:
    width, theme = int(view.split()[0]), view.split()[1]
    page = show(plan_explorer(), width=width, color_scheme=theme)
    paint(page, theme)
    for gpus in (64, 1024, 8):
        turn(page, "GPUs", places("GPUs").index(gpus))
        assert_readable(page, f"{gpus} GPUs")
        assert page.evaluate(f"document.querySelector('{PLAYER}').scrollWidth <= {width}")
    assert axe_finds(page) == ""
    assert page.evaluate(f"{PICTURE}.length")
