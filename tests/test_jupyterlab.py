"""The player in a real JupyterLab: a cell runs, the player plays, and its keys stay its own."""
from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_notebook

from book.authoring.normalise import KERNELSPEC
from tests.browser import Browser
from tests.jupyterlab import notebook_address, running_lab

CELLS = ["from book.collectives import ring_all_reduce\nfrom book.widgets import play",
         "player = play(ring_all_reduce(4))\nplayer"]
SLOW_MS, STEP_MS = 60_000, 1500


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A JupyterLab whose folder holds one notebook, player.ipynb, that never ran."""
    folder = tmp_path_factory.mktemp("student")
    cells = [new_code_cell(source) for source in CELLS]
    nbformat.write(new_notebook(cells=cells, metadata={"kernelspec": KERNELSPEC}), folder / "player.ipynb")
    with running_lab(folder, tmp_path_factory.mktemp("settings")) as address:
        yield address


def test_the_player_plays_in_jupyterlab(lab: str, browser: Browser) -> None:
    page, log = browser.open(notebook_address(lab, "player.ipynb"), width=1400)
    page.get_by_text("player = play").first.wait_for(timeout=SLOW_MS)
    page.get_by_text("| Idle").wait_for(timeout=SLOW_MS)  # cells that are run before the kernel is there are dropped
    page.get_by_role("menuitem", name="Run", exact=True).click()
    page.get_by_text("Run All Cells", exact=True).click()

    player = page.locator(".jp-OutputArea .lockstep-player")
    player.wait_for(timeout=SLOW_MS)
    assert player.count() == 1, "one player: the live widget stands for the static page's HTML"
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
