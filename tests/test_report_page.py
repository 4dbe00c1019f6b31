"""The page that `lockstep run --out` leaves, in a real Chromium without a network: of a real run, and of others."""
from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from book.look.runs import FILE, read_run
from book.report.page import write_run_page
from tests.test_look import run_in
from tests.website import ROOT

pytestmark = pytest.mark.slow
LOOKS = ((1280, "light"), (1280, "dark"), (390, "light"))
# What reaches beyond the sides of the window and can't be scrolled to within a box of its own.
OUTSIDE = """() => [...document.body.querySelectorAll("*")].filter(e => {
  const { left, right, width } = e.getBoundingClientRect();
  return width && (left < 0 || right > innerWidth) && !e.closest(".wide") && getComputedStyle(e).clipPath === "none";
}).map(e => e.outerHTML.slice(0, 120))"""


def opened(browser: Any, path: Path) -> list[str]:
    """Open a page in each look; returns what it says in the first."""
    said = []
    for width, scheme in LOOKS:
        page, log = browser.open(path.as_uri(), width=width, color_scheme=scheme)
        page.locator(".lk-stage svg").first.wait_for()
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        assert page.evaluate(OUTSIDE) == []
        said.append(page.locator("body").inner_text())
        page.get_by_title("Back to the start").click()
        page.get_by_title("One step forward").click()
        page.wait_for_timeout(100)
        log.assert_clean()
    assert said[0] == said[1]
    return said[0].splitlines()


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a real run of an example."""
    folder = tmp_path_factory.mktemp("kept")
    subprocess.run([sys.executable, "-m", "book", "run", "--ranks", "2", "--hang-s", "60", "--out", str(folder),
                    str(ROOT / "examples" / "train_ddp.py")], check=True, capture_output=True, timeout=240, cwd=folder,
                   env=os.environ | {"PYTHONPATH": str(ROOT)})
    return folder


def test_the_page_of_a_real_run_is_whole_and_fits_at_each_width(browser: Any, kept: Path) -> None:
    said = opened(browser, kept / "report.html")
    run = read_run(kept / FILE)
    assert said[0] == "A run of 2 ranks that has ended" and len(run.said) > 3
    assert all(line.strip() in "\n".join(said) for line in run.said)
    assert {"rank 0", "rank 1", "exchange", "What was called"} <= {line.strip() for line in said}


@pytest.mark.parametrize("num_ranks, state", [(64, "ended"), (4, "hung"), (4, "failed")])
def test_pages_of_other_runs_fit_too(browser: Any, tmp_path: Path, num_ranks: int, state: str) -> None:
    folder = run_in(tmp_path / "run", num_ranks, state=state)
    write_run_page(tmp_path / "report.html", read_run(folder / FILE))
    said = opened(browser, tmp_path / "report.html")
    assert said[0].startswith(f"A run of {num_ranks} ranks that ")
    begins = "Ranks 0, 1, 3 wait for", "Here ranks 0, 1, 2, 3 had made call 40"
    told = [line for line in said if line.startswith(begins)]
    assert len(told) == 2 * (state == "hung"), "the graph's caption; then the player's, which has stopped there"
