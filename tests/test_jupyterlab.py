"""Widgets in a real JupyterLab: a cell runs, the widget plays, and its keys stay its own."""
from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_notebook

from book.authoring.normalise import KERNELSPEC
from tests.browser import Browser, Log
from tests.jupyterlab import notebook_address, running_lab

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
SLOW_MS, STEP_MS = 60_000, 1500


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A JupyterLab whose folder holds notebooks that never ran: player.ipynb, timeline.ipynb, shards.ipynb, game.ipynb."""
    folder = tmp_path_factory.mktemp("student")
    for name, sources in (("player", PLAYER), ("timeline", TIMELINE), ("shards", SHARDS), ("game", GAME)):
        cells = [new_code_cell(source) for source in sources]
        nbformat.write(new_notebook(cells=cells, metadata={"kernelspec": KERNELSPEC}), folder / f"{name}.ipynb")
    with running_lab(folder, tmp_path_factory.mktemp("settings")) as address:
        yield address


def run_all(lab: str, browser: Browser, name: str) -> tuple[Any, Any, Log]:
    """Open a notebook and run its cells; returns the page, the one widget on it, and what went wrong."""
    page, log = browser.open(notebook_address(lab, name), width=1400)
    page.get_by_text("from book").first.wait_for(timeout=SLOW_MS)
    page.get_by_text("| Idle").wait_for(timeout=SLOW_MS)  # cells that are run before the kernel is there are dropped
    page.get_by_role("menuitem", name="Run", exact=True).click()
    page.get_by_text("Run All Cells", exact=True).click()
    widget = page.locator(".jp-OutputArea .lockstep-player")
    widget.wait_for(timeout=SLOW_MS)
    assert widget.count() == 1, "one widget: the live one stands for the static page's HTML"
    return page, widget, log


def test_the_timeline_plays_in_jupyterlab(lab: str, browser: Browser) -> None:
    _, timeline, log = run_all(lab, browser, "timeline.ipynb")
    timeline.get_by_role("button", name="One step forward").click()
    timeline.locator(".lk-caption").get_by_text("the gradient of weight is ready").wait_for()
    assert timeline.locator(".lk-bucket.flying").count() == 2
    log.assert_clean()


def test_a_product_of_the_readers_own_plays_in_jupyterlab(lab: str, browser: Browser) -> None:
    _, product, log = run_all(lab, browser, "shards.ipynb")
    product.get_by_role("button", name="One step forward").click()
    product.locator(".lk-caption").get_by_text("Every rank multiplies its columns of X").wait_for()
    product.locator(".lk-cell").nth(2).get_by_text("1/2 terms").wait_for()
    log.assert_clean()


def test_the_game_gives_the_kernel_a_schedule(lab: str, browser: Browser) -> None:
    page, game, log = run_all(lab, browser, "game.ipynb")
    game.focus()
    cells = page.locator(".jp-Notebook .jp-CodeCell").count()
    for key in ("f", "f", "ArrowDown", "f", "b"):  # "b" would insert a cell below
        page.keyboard.press(key)
    page.get_by_text("# placed,2,2 / 0F0,0F1 / 1F0,1B0 /").wait_for()
    assert page.locator(".jp-Notebook .jp-CodeCell").count() == cells
    log.assert_clean()


def test_the_player_plays_in_jupyterlab(lab: str, browser: Browser) -> None:
    page, player, log = run_all(lab, browser, "player.ipynb")
    caption = player.locator(".lk-caption")
    player.get_by_role("button", name="One step forward").click()
    caption.get_by_text("Step 1").wait_for()
    assert "rank 0 sends" in caption.inner_text()
    page.wait_for_timeout(STEP_MS)  # a key during a step's motion ends that step

    cells = page.locator(".jp-Notebook .jp-CodeCell").count()
    for key in ("ArrowRight", "a", "b", "d", "d"):  # in JupyterLab's command mode: insert cells, delete one
        page.keyboard.press(key)
    caption.get_by_text("Step 2").wait_for()
    assert page.locator(".jp-Notebook .jp-CodeCell").count() == cells
    log.assert_clean()
