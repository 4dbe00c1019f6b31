"""Widgets in a real JupyterLab: a cell runs, the widget plays, and its keys stay its own."""
from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_notebook

from book.authoring.normalise import KERNELSPEC
from tests.browser import Browser, Log
from tests.jupyterlab import notebook_address, running_lab
from tests.website import ROOT

PLAYER = ["from book.collectives import ring_all_reduce\nfrom book.widgets import play",
          "player = play(ring_all_reduce(4))\nplayer"]
TIMELINE = ["from book.trace import Event, Trace\nfrom book.widgets import bucket_timeline", """\
events = [Event(rank, "compute", "weight", num_bytes=8, start_s=0, end_s=1, bucket=0) for rank in (0, 1)]
events += [Event(rank, "collective", "all_reduce", num_bytes=8, start_s=1, end_s=3, bucket=0) for rank in (0, 1)]
bucket_timeline(Trace(events, 2, "modelled", "recorded"))"""]
SHARDS = ["import torch.distributed as dist\n\nfrom book.launch import launch\n"
          "from book.shards import trace_product\nfrom book.widgets import sharded_product", """\
def by_rows(x, a):
    rank, size = dist.get_rank(), dist.get_world_size()
    y = x.chunk(size, dim=1)[rank] @ a.chunk(size, dim=0)[rank]
    dist.all_reduce(y)
    return y
sharded_product(launch(trace_product, 2, by_rows, record=True).trace)"""]
GAME = ["import ipywidgets\nimport traitlets\n\nfrom book.widgets import pipeline_game", """\
game, order = pipeline_game(2, 2), ipywidgets.Label()
traitlets.dlink((game, "placed"), (order, "value"), lambda _: game.schedule.to_csv().replace("\\n", " / "))
ipywidgets.VBox([game, order])"""]
# What a learner of lab 3 has when `mine` is bound to what came, instead of that being added to the chunk.
REBOUND = ["setup", "seed", "numbers", "reduce-scatter-step", "play-1"]
WIDGET, CELL = ".jp-OutputArea .lockstep-player", ".jp-Notebook .jp-CodeCell"
SLOW_MS = 60_000


def rebound() -> list[str]:
    """The cells of the lab up to the player of its first exercise, with that answer."""
    lab = nbformat.read(ROOT / "labs" / "03_ring_all_reduce.ipynb", as_version=4)
    sources = {cell.metadata["lockstep"]["id"]: cell.source for cell in lab.cells if cell.cell_type == "code"}
    right = sources["reduce-scatter-step"]
    sources["reduce-scatter-step"] = right.replace("mine += incoming", "mine = incoming")
    assert sources["reduce-scatter-step"] != right
    return [sources[name] for name in REBOUND]


UNTOUCHED = ["from book.checks import unwritten\n\nunwritten.install()", """\
def answer():
    raise NotImplementedError("exercise 2: write this function, then run the cell")""", "made = answer()",
             "print(made)", "from book.collectives import ring_all_reduce\nfrom book.widgets import play",
             "play(ring_all_reduce(4))"]
NOTEBOOKS = {"untouched": UNTOUCHED, "widgets": [*PLAYER, *TIMELINE, *GAME], "shards": SHARDS, "rebound": rebound()}


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A JupyterLab whose folder holds notebooks that never ran: widgets.ipynb, shards.ipynb, rebound.ipynb."""
    folder = tmp_path_factory.mktemp("student")
    for name, sources in NOTEBOOKS.items():
        cells = [new_code_cell(source) for source in sources]
        nbformat.write(new_notebook(cells=cells, metadata={"kernelspec": KERNELSPEC}), folder / f"{name}.ipynb")
    (folder / "shards.expected.json").write_text("{}")
    with running_lab(folder, tmp_path_factory.mktemp("settings")) as address:
        yield address


def run_all(lab: str, browser: Browser, name: str, num_widgets: int) -> tuple[Any, Log]:
    """Open a notebook and run its cells; returns the page and what went wrong."""
    page, log = browser.open(notebook_address(lab, name), width=1400, height=3000)
    page.get_by_text("from book").first.wait_for(timeout=SLOW_MS)
    page.get_by_text("| Idle").wait_for(timeout=SLOW_MS)  # cells that are run before the kernel is there are dropped
    page.get_by_role("menuitem", name="Run", exact=True).click()
    page.get_by_text("Run All Cells", exact=True).click()
    widgets = page.locator(WIDGET)
    widgets.nth(num_widgets - 1).wait_for(timeout=SLOW_MS)
    assert widgets.count() == num_widgets, "the live ones stand for the static page's HTML"
    return page, log


@pytest.mark.slow
def test_widgets_play_in_jupyterlab(lab: str, browser: Browser) -> None:
    """All in one notebook: what costs is JupyterLab's own start."""
    page, log = run_all(lab, browser, "widgets.ipynb", 3)
    player, timeline, game = (page.locator(WIDGET).nth(index) for index in range(3))
    keys_stay_with_the_player(page, player)
    timeline.get_by_role("button", name="One step forward").click()
    timeline.locator(".lk-caption").get_by_text("the gradient of weight is ready").wait_for()
    assert timeline.locator(".lk-bucket.flying").count() == 2
    the_game_gives_the_kernel_a_schedule(page, game)
    files = page.locator(".jp-DirListing-itemText")
    files.get_by_text("shards.ipynb").wait_for()
    assert not files.get_by_text("expected").count(), "what a lab's checks must print is no file for students"
    assert not page.get_by_text("Jupyter news").count()
    log.assert_clean()


def keys_stay_with_the_player(page: Any, player: Any) -> None:
    """Keys that insert and delete cells in JupyterLab's command mode."""
    caption, cells = player.locator(".lk-caption"), page.locator(CELL).count()
    player.get_by_role("button", name="One step forward").click()
    caption.get_by_text("Step 1").wait_for()
    assert "rank 0 sends" in caption.inner_text()
    page.wait_for_function("at => document.querySelector(at).dataset.playing === 'false'", arg=WIDGET)
    for key in ("ArrowRight", "a", "b", "d", "d"):
        page.keyboard.press(key)
    caption.get_by_text("Step 2").wait_for()
    assert page.locator(CELL).count() == cells


def the_game_gives_the_kernel_a_schedule(page: Any, game: Any) -> None:
    """The kernel says what it got in a label below; "b" alone would insert a cell."""
    game.focus()
    cells = page.locator(CELL).count()
    for key in ("f", "f", "ArrowDown", "f", "b"):
        page.keyboard.press(key)
    page.get_by_text("# placed,2,2 / 0F0,0F1 / 1F0,1B0 /").wait_for()
    assert page.locator(CELL).count() == cells


@pytest.mark.slow
def test_a_readers_own_product_plays_in_jupyterlab(lab: str, browser: Browser) -> None:
    page, log = run_all(lab, browser, "shards.ipynb", 1)
    product = page.locator(WIDGET)
    product.get_by_role("button", name="One step forward").click()
    product.locator(".lk-caption").get_by_text("Every rank multiplies its columns of X").wait_for()
    product.locator(".lk-cell").nth(2).get_by_text("1/2 terms").wait_for()
    log.assert_clean()


@pytest.mark.slow
def test_a_learners_mistake_opens_at_the_step_where_it_shows(lab: str, browser: Browser) -> None:
    page, log = run_all(lab, browser, "rebound.ipynb", 1)
    player = page.locator(WIDGET)
    player.locator(".lk-head").get_by_text("rank 1's chunk 0 lacks rank 0, from step 1 on").wait_for()
    assert player.get_attribute("data-step") == "1" and player.locator(".lk-track.wrong").count() == 4
    code = "for request in dist.batch_isend_irecv(transfers):"
    sent = f"Sent by line 10 of your cell, in reduce_scatter_step: {code}"
    assert player.locator(".lk-callline").inner_text() == sent
    player.get_by_role("button", name="Beside the right run").click()
    player.locator(".lk-lane").nth(1).get_by_text("2/4").first.wait_for()
    log.assert_clean()


@pytest.mark.slow
def test_run_all_goes_on_after_an_answer_that_is_not_written(lab: str, browser: Browser) -> None:
    page, log = run_all(lab, browser, "untouched.ipynb", 1)
    told = page.locator(".jp-OutputArea-output").filter(has_text="Not written yet")
    told.nth(1).wait_for(timeout=SLOW_MS)
    assert [text.strip() for text in told.all_inner_texts()] == [
        "Not written yet. This cell needs exercise 2: write its function, then run this cell again."] * 2
    log.assert_clean()
