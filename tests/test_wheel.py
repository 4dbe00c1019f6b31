"""The package from its wheel alone: it brings what pages need, and a saved widget plays without anything else."""
from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from book.collectives import ring_all_reduce
from book.cost import Link
from book.simulate import simulate
from book.trace import Trace
from book.widgets import panel, play
from tests.browser import Browser
from tests.website import ROOT

READS = ["pyproject.toml", "README.md", "book/*"]
SAVES = """
import sys
sys.modules.update(dict.fromkeys(["anywidget", "ipywidgets", "matplotlib", "torch", "traitlets"]))
import book
from book.collectives import ring_all_reduce
from book.pipelines import one_f_one_b
from book.widgets import memory_bars, pipeline_game, pipeline_player, play
print(book.__file__)
for name, shown in {"play": play(ring_all_reduce(3)), "bars": memory_bars(), "game": pipeline_game(),
                    "pipeline": pipeline_player(one_f_one_b(2, 4))}.items():
    shown.save(f"{name}.html")
"""


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what the wheel holds, made of a copy of the sources: building writes beside them."""
    source, out = (tmp_path_factory.mktemp(name) for name in ("source", "wheel"))
    shutil.copytree(ROOT / "book", source / "book", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, source)
    subprocess.run([sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index",
                    "-w", str(out), str(source)], check=True)
    with zipfile.ZipFile(next(out.glob("*.whl"))) as wheel:
        wheel.extractall(out / "unpacked")
    return out / "unpacked"


@pytest.mark.slow
def test_the_wheel_contains_all_files_of_the_package(unpacked: Path) -> None:
    def files(folder: Path) -> set[str]:
        return {str(path.relative_to(folder)) for path in folder.rglob("*")
                if path.is_file() and "__pycache__" not in path.parts}

    assert files(unpacked / "book") == files(ROOT / "book")


@pytest.mark.full
def test_widgets_saved_by_the_wheel_play_without_a_network(unpacked: Path, tmp_path: Path, browser: Browser) -> None:
    told = subprocess.run([sys.executable, "-c", SAVES], cwd=tmp_path, env={"PYTHONPATH": str(unpacked)},
                          capture_output=True, text=True, check=True).stdout
    assert told.strip() == str(unpacked / "book" / "__init__.py")
    for name in ("play", "bars", "game", "pipeline"):
        page, log = browser.open((tmp_path / f"{name}.html").as_uri())
        page.locator(".lockstep-player :is(button, input, select):visible").first.wait_for()
        log.assert_clean()
        assert page.evaluate("performance.getEntriesByType('resource').length") == 0
    page, log = browser.open((tmp_path / "play.html").as_uri())
    page.locator(".lockstep-player").focus()
    page.keyboard.press("ArrowRight")
    page.locator('.lockstep-player[data-step="1"]').wait_for()
    log.assert_clean()


def test_a_live_widget_and_a_panel_save_what_they_show_last(tmp_path: Path) -> None:
    pytest.importorskip("anywidget")

    def run(num_ranks: int) -> Trace:
        return simulate(ring_all_reduce(num_ranks), 1e6, Link(1e-5, 1e9))

    live, rerun = play(run(2), title="A ring"), panel(run, title="A ring", num_ranks=(2, 4))
    for shown in (live, rerun):
        shown.save(tmp_path / "before.html")
        assert live.shown.html() in (tmp_path / "before.html").read_text(encoding="utf-8")
    rerun.children[0].children[0].value = 4
    rerun.button.click()
    live.trace = run(4)
    for shown in (live, rerun):
        shown.save(tmp_path / "after.html")
        assert live.shown.html() in (tmp_path / "after.html").read_text(encoding="utf-8")
    assert (tmp_path / "before.html").read_bytes() != (tmp_path / "after.html").read_bytes()
