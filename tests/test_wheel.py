"""What an installation holds: the wheel, its extras, its command, and whose work it builds on."""
from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import zipfile
from importlib import import_module
from pathlib import Path

import pytest
import torch

from book.__main__ import COMMANDS, main
from book.collectives import ring_all_reduce
from book.cost import Link
from book.record.provenance import read
from book.record.recording import Operation
from book.record.snapshots import BufferWatch
from book.simulate import simulate
from book.trace import Trace
from book.widgets import panel, play
from tests.browser import Browser
from tests.website import ROOT



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


@pytest.mark.slow
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


LAUNCH = "from book.launch import launch; launch(print, 2)"
ADVICE = "pip install 'lockstep-book[run]'"


def said(program: str, *missing: str) -> str:
    """The last line that a Python without these packages writes to stderr."""
    hidden = f"import sys; sys.modules.update(dict.fromkeys({missing!r}))\n"
    done = subprocess.run([sys.executable, "-c", hidden + program], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 1
    return done.stderr.strip().splitlines()[-1]


@pytest.mark.slow
@pytest.mark.parametrize("program, missing, needs", [
    (LAUNCH, ["torch"], "launch needs torch"),
    (LAUNCH, ["torch", "cloudpickle"], "launch needs torch and cloudpickle"),
    (LAUNCH, ["cloudpickle"], "launch needs cloudpickle"),
    ("from book.launch import rank_device; rank_device()", ["torch"], "rank_device needs torch"),
    ("from book.plot import lines", ["matplotlib"], "book.plot needs matplotlib"),
    ("import book.device", ["torch"], "book.device needs torch"),
    ("from book.record.stages import follow_stages", ["torch"], "book.record needs torch"),
    ("from book.execute import execute", ["torch"], "book.execute needs torch"),
    ("from book.shards import trace_mlp", ["torch"], "book.shards needs torch"),
    ("from book.parallel.pipeline import Mail", ["torch"], "book.parallel needs torch"),
    ("from book.widgets import panel; panel(print)", ["anywidget"], "panel needs anywidget"),
    ("from book.widgets import panel; panel(print)", ["ipywidgets"], "panel needs ipywidgets"),
])
def test_a_missing_package_is_named_with_how_to_install_it(program: str, missing: list[str], needs: str) -> None:
    assert said(program, *missing) == f"ModuleNotFoundError: {needs}: {ADVICE}"


def test_the_extra_that_is_named_has_these_packages() -> None:
    listed = re.search(r"^run = (.*)$", (ROOT / "pyproject.toml").read_text(encoding="utf-8"), re.MULTILINE)
    packages = {requirement.split(">=")[0] for requirement in json.loads(listed[1])}
    assert {"torch", "cloudpickle", "matplotlib", "ipywidgets", "anywidget"} <= packages


class Program:
    """Rank 0 of two, whose buffer of one chunk is watched, and which receives into one spare tensor."""

    def __init__(self):
        self.buffer, self.spare, self.operations = torch.tensor([1.0, 0.0]), torch.zeros(2), []
        self.watch = BufferWatch(self.buffer, 1, 2, 1e-7, 0)
        self.position = 0

    def receive(self, *lanes):
        """Receive and wait at once; returns a copy of the message."""
        operation, index = Operation("recv", None, "0", (0, 1), 1, 0, 8.0, start_ns=0, end_ns=1), len(self.operations)
        self.operations.append(operation)
        self.watch.issued(index, operation, [self.spare], self.position)
        self.spare.copy_(torch.tensor(lanes))
        self.watch.waited(index, operation, [self.spare], self.position + 1)
        self.position += 2
        return self.spare.clone()

    def pieces(self):
        """For each receive, what was done with it and what the chunk held afterwards."""
        found, _ = read(self.watch, self.operations, self.position)
        return [(piece.op, piece.contributions) for index in sorted(found) for piece in found[index]]


@pytest.mark.parametrize("num_between, added", [(0, ("reduce", (1, 1))), (1, ("reduce", (1, 1))), (2, (None, None))])
def test_a_copy_is_expected_until_its_memory_has_been_used_twice_more(num_between, added):
    program = Program()
    copy = program.receive(0.0, 1.0)
    for _ in range(num_between):
        program.receive(0.0, 5.0)
    program.buffer += copy
    assert program.pieces()[0] == added


def test_words_lead_to_their_parts(capsys: pytest.CaptureFixture[str]) -> None:
    line = ["plan", "llama3-8b", "--gpus", "8"]
    assert main(line) == 0
    asked = capsys.readouterr().out
    assert import_module("book.cost.__main__").main(line) == 0 and capsys.readouterr().out == asked


@pytest.mark.parametrize("word", COMMANDS)
def test_every_word_has_a_part_that_knows_it(word: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([word, "--help"])
    assert ended.value.code == 0 and capsys.readouterr().out.startswith(f"usage: lockstep {word} ")


def test_help_is_one_line_for_each_word_and_another_word_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == main(["--help"]) == 0
    told = capsys.readouterr().out
    assert all(f"  lockstep {word} " in told for word in COMMANDS)
    assert main(["plna"]) == 2
    assert capsys.readouterr().err == f"lockstep has no command 'plna': use {', '.join(COMMANDS)}\n"


@pytest.mark.slow
def test_it_is_installed_and_is_the_module() -> None:
    script = Path(sys.executable).with_name("lockstep")
    for command in ([str(script)], [sys.executable, "-m", "book"]):
        told = subprocess.run([*command, "models"], capture_output=True, text=True, check=True).stdout
        assert told.startswith("models: ")
