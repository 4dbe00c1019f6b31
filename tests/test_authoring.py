"""The normal form, the lint and the runner for notebooks, and labs that are begun by a command."""
from __future__ import annotations

import contextlib
import html
import io
import os
import re
import struct
import subprocess
import sys
import zlib
from itertools import combinations
from pathlib import Path
from typing import Any

import matplotlib
import nbformat
import numpy as np
import pytest
from matplotlib import image
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output
from PIL import Image, ImageFont

from book.authoring import slides
from book.authoring.__main__ import main, parser
from book.authoring.figures import LEDGER, figures, table_of
from book.authoring.lint import lint
from book.authoring.normalise import WIDGET_VIEW, differences, normal_text
from book.authoring.notebooks import NotebookError, find, parse
from book.authoring.photos import camera
from book.authoring.png import shrunk
from book.authoring.prose import plain
from book.authoring.syllabus import SYLLABUS, weeks
from book.grading.__main__ import main as grading
from book.grading.lab import checks, code_cells, job, marks, points, read_lab
from book.grading.lint import marked_wrongly
from book.grading.reference import PATIENT
from book.grading.run import PYTEST, run
from tests.browser import find_browser
from tests.website import ROOT



NOTEBOOKS = find([ROOT / "chapters", ROOT / "labs"])
NAMES = [str(path.relative_to(ROOT)) for path in NOTEBOOKS]
HERE = Path("untitled.ipynb")

TINY_PLAYER = '''
import json
from pathlib import Path
import anywidget, traitlets

class Tiny(anywidget.AnyWidget):
    """A minimal player: data for the kernel's front end, and the same data as HTML for everything else."""
    _esm = "export default {render({model, el}) { el.textContent = model.get('data'); }}"
    data = traitlets.List().tag(sync=True)

    def __repr__(self):
        return "Tiny player"

    def _repr_mimebundle_(self, **options):
        bundle, metadata = super()._repr_mimebundle_(**options)
        return {**bundle, "text/html": f"<div>{json.dumps(self.data)}</div>", "text/plain": repr(self)}, metadata
'''


def ran(source: str, *outputs: nbformat.NotebookNode, **metadata: object) -> nbformat.NotebookNode:
    """A code cell as it is after a run."""
    return new_code_cell(source, execution_count=7, outputs=list(outputs), metadata=metadata)


def stream(text: str, name: str = "stdout") -> nbformat.NotebookNode:
    """What a cell printed."""
    return new_output("stream", name=name, text=text)


def notebook(*cells: nbformat.NotebookNode) -> nbformat.NotebookNode:
    """A notebook whose first cell follows the house rules."""
    return new_notebook(cells=[ran("from book.collectives import ring_all_reduce"), *cells])


def messages(*cells: nbformat.NotebookNode) -> str:
    """What the linter says about a notebook with these cells."""
    return "\n".join(f"{problem.cell}: {problem.message}" for problem in lint(notebook(*cells)))


def nbval(path: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """Run one notebook strictly in its own process."""
    command = [sys.executable, "-c", PYTEST, "--nbval", "--nbval-current-env",
               "--nbval-cell-timeout", "60", "-q", "-p", "no:cacheprovider", *options, str(path)]
    return subprocess.run(command, cwd=path.parent, env={**os.environ, "PYTHONPATH": str(ROOT)}, text=True,
                          capture_output=True, timeout=120)


# The book's own notebooks


@pytest.mark.parametrize("path", NOTEBOOKS, ids=NAMES)
def test_stored_notebook_is_in_normal_form(path: Path) -> None:
    assert not list(differences(path.read_text("utf-8"), path)), "fix with: python -m book.authoring normalise"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=NAMES)
def test_stored_notebook_keeps_the_rules(path: Path) -> None:
    assert not lint(parse(path.read_text("utf-8"), path))


# The normal form


def messy() -> nbformat.NotebookNode:
    """Everything that the normal form removes, in one notebook."""
    result = new_output("execute_result", execution_count=99, metadata={"isolated": True},
                        data={"text/html": "<b>4</b>", "text/plain": "4", WIDGET_VIEW: {"model_id": "5f2c"}})
    error = new_output("error", ename="KeyError", evalue="'x'", traceback=[
        "File /tmp/ipykernel_4242/1234.py:1", "File ~/env/lib/python3.11/site-packages/torch/nn.py:3",
        "File /usr/lib/python3.12/json/decoder.py:1"])
    cells = [new_markdown_cell("# Title"), ran("print(1)", stream("1"), stream("!", "stderr"), stream("2\n"),
                                               execution={"iopub.status.busy": "2026-01-01"}, collapsed=False),
             new_code_cell(""), ran("4", result, tags=["a"], lab={"points": 2}), ran("{}['x']", error, tags=[])]
    return new_notebook(cells=cells, metadata={"widgets": {}, "kernelspec": {"name": "mine", "display_name": "Mine"},
                                               "language_info": {"name": "python", "version": "3.11.7"}})


def normal(found: nbformat.NotebookNode) -> nbformat.NotebookNode:
    """The normal form of `found`, parsed as a notebook."""
    return nbformat.reads(normal_text(nbformat.writes(found), HERE), as_version=4)


def test_normal_form_removes_what_differs_between_runs() -> None:
    title, printed, empty, value, failed = normal(messy()).cells
    assert [c.execution_count for c in (printed, empty, value, failed)] == [1, None, 2, 3]
    assert [o.text for o in printed.outputs] == ["12\n", "!"] and not printed.metadata
    assert value.outputs[0].execution_count == 2 and set(value.outputs[0].data) == {"text/html", "text/plain"}
    assert value.metadata == {"tags": ["a"], "lab": {"points": 2}}
    assert failed.outputs[0].traceback == ["File cell.py:1", "File site-packages/torch/nn.py:3",
                                           "File python3/json/decoder.py:1"]


def test_normal_form_is_the_same_for_two_saves_and_idempotent() -> None:
    """Editors make new random ids at each save of a new cell: two saves must come out the same."""
    first, second = (normal_text(nbformat.writes(messy()), HERE) for _ in range(2))
    assert first == second == normal_text(first, HERE)
    assert first.endswith("}\n") and '\n "cells"' in first


def test_a_chosen_id_is_kept_and_a_random_one_is_replaced_once() -> None:
    chosen = notebook(ran("1 + 1"), ran("1 + 1"))
    chosen.cells[1]["id"] = "ring-step-check"
    before = normal(chosen)
    before.cells[2].source = "1 + 2"
    after = normal(before)
    assert after.cells[1].id == "ring-step-check"
    assert after.cells[2].id == before.cells[2].id


def test_a_cell_that_never_ran_gets_no_count() -> None:
    assert normal(notebook(new_code_cell("print(1)"))).cells[1].execution_count is None


def test_check_names_the_notebook_and_the_cell(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "ring.ipynb"
    nbformat.write(messy(), path)
    assert main(["normalise", "--check", str(path)]) == 1
    said = capsys.readouterr().out
    assert "ring.ipynb" in said and "Cell 0" in said and "metadata" in said
    assert main(["normalise", str(tmp_path)]) == 0 and main(["normalise", "--check", str(tmp_path)]) == 0


def test_a_path_that_is_not_a_notebook_gets_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["lint", str(tmp_path / "missing.ipynb")]) == 1
    assert "neither a notebook nor a folder" in capsys.readouterr().err
    (tmp_path / "broken.ipynb").write_text("{")
    with pytest.raises(NotebookError, match="can't be read as a notebook"):
        parse("{", HERE)


# The lint


def test_a_clean_notebook_has_no_problem() -> None:
    assert messages(ran("print(4)", stream("4\n")), ran("x = 1; y = 2"), ran("%time\nprint(1)")) == ""


@pytest.mark.parametrize("source, said", [
    ("from ipywidgets import interact", "interact is banned"),
    ("import ipywidgets as w\nw.Output()", "Output is banned"),
    ("from IPython.display import clear_output\nclear_output()", "clear_output is banned"),
    ("display(1, display_id='a')", "display_id is banned"),
    ("handle.update_display(1)", "update_display is banned"),
    ("open('trace.json').read()", "open reads a file"),
    ("figure = 1\nfigure;  # quiet", "ends in ';'"),
])
def test_banned_source(source: str, said: str) -> None:
    found = notebook(ran(source))
    problems = lint(found)
    assert [problem.cell for problem in problems] == [f"Cell 1 ({found.cells[1].id})"]
    assert said in problems[0].message


@pytest.mark.parametrize("output, said", [
    (stream("<Work object at 0x7f3a2b10>"), "an address in memory"),
    (stream("saved to /tmp/abc/trace"), "a path of one machine"),
    (stream("warning", "stderr"), "writes to stderr"),
    (new_output("error", ename="ValueError", evalue="no", traceback=[]), "stores a ValueError"),
    (new_output("display_data", data={WIDGET_VIEW: {}, "text/plain": "IntSlider"}), "stores a widget view"),
])
def test_banned_output(output: nbformat.NotebookNode, said: str) -> None:
    assert said in messages(ran("something()", output))


def test_an_expected_error_is_tagged() -> None:
    error = new_output("error", ename="ValueError", evalue="no", traceback=[])
    assert messages(ran("raise ValueError('no')", error, tags=["raises-exception"])) == ""


def test_a_stream_is_joined_across_what_is_shown_between_its_pieces() -> None:
    """As nbval joins it before it compares: where the pieces are cut differs between runs."""
    shown = new_output("display_data", data={"text/plain": "chart"})
    cell = normal(new_notebook(cells=[ran("f()", stream("a\n"), shown, stream("b\n"))])).cells[0]
    assert [output.get("text", output.output_type) for output in cell.outputs] == ["a\nb\n", "display_data"]


def test_a_cell_that_never_ran_is_a_problem() -> None:
    assert "never ran" in messages(new_code_cell("print(1)"))
    assert messages(new_code_cell("")) == ""


def test_ignored_cells_are_few_and_measured_and_not_players() -> None:
    timed = ran("clock()", stream("3 ms, measured on 2 cores"), tags=["nbval-ignore-output"])
    plain = [ran("1"), ran("2"), ran("3")]
    assert messages(timed, *plain) == ""
    assert "1 of 3 code cells are not compared" in messages(timed, *plain[:1]), "a third is too many"
    assert "2 of 4 code cells are not compared" in messages(timed, ran("# NBVAL_IGNORE_OUTPUT\n1"), ran("2"))
    assert "measured on" in messages(ran("clock()", stream("3 ms"), tags=["nbval-ignore-output"]), *plain)
    beside = new_markdown_cell("The times below were measured on 2 cores.")
    assert messages(beside, ran("clock()", stream("3 ms"), tags=["nbval-ignore-output"]), *plain) == ""
    assert "plays a trace" in messages(ran("play(t)  # measured on", tags=["nbval-ignore-output"]), *plain)
    assert "is skipped" in messages(ran("clock()", tags=["nbval-skip"]), *plain)


def test_hidden_code_is_a_problem_except_a_solution_and_a_check_kept_for_grading() -> None:
    assert "is hidden" in messages(ran("secret = 1", tags=["hide-input"]))
    graded = ran("secret = 1", tags=["remove-cell"])
    assert "is hidden" in messages(graded)
    graded.metadata["lockstep"] = {"kind": "check", "hidden": True}
    assert messages(graded) == ""
    assert messages(ran("### BEGIN SOLUTION\nx = 1\n### END SOLUTION", tags=["hide-input"])) == ""


def test_of_a_chapters_code_only_what_makes_its_first_figure_is_folded() -> None:
    picture = new_output("display_data", data={"image/png": "", "text/plain": "<Figure>"})

    def folded(number: int, how: str, **marks: object) -> str:
        cells = [ran("x = 1", stream("1")), ran("a()", picture, **marks), ran("b()", picture)]
        cells[number].metadata["tags"] = [how]
        return "".join(problem.message for problem in lint(notebook(*cells)))

    assert folded(1, "hide-input") == ""
    assert all("is hidden" in folded(number, "hide-input") for number in (0, 2))
    assert all("is hidden" in folded(1, how) for how in ("hide-cell", "remove-input", "remove-cell"))
    assert "is hidden" in folded(1, "hide-input", lockstep={"kind": "setup"}), "a lab has no opening"


@pytest.mark.parametrize("source, said", [("import torch", "import by name"),
                                          ("from book.launch import *", "imports *")])
def test_the_first_cell_imports_by_name(source: str, said: str) -> None:
    assert said in "".join(problem.message for problem in lint(new_notebook(cells=[ran(source)])))


# Running, and strict nbval on what was stored


@pytest.mark.slow
def test_run_stores_outputs_that_a_strict_nbval_run_repeats(tmp_path: Path) -> None:
    """A player's live bundle has a widget view, the stored one does not; everything else in it is compared."""
    path = tmp_path / "player.ipynb"
    cells = [ran(TINY_PLAYER), ran("Tiny(data=[1, 2, 3])"), ran("Path.cwd().name")]
    nbformat.write(new_notebook(cells=cells), path)
    assert main(["run", str(path)]) == 0

    stored = nbformat.read(path, as_version=4)
    assert stored.cells[1].outputs[0].data == {"text/html": "<div>[1, 2, 3]</div>", "text/plain": "Tiny player"}
    assert stored.cells[2].outputs[0].data == {"text/plain": repr(tmp_path.name)}, "a notebook runs in its own folder"
    assert not list(differences(path.read_text("utf-8"), path))
    first = nbval(path)
    assert first.returncode == 0 and "3 passed" in first.stdout, first.stdout

    path.write_text(path.read_text("utf-8").replace("data=[1, 2, 3]", "data=[1, 9, 3]"), "utf-8")
    changed = nbval(path)
    assert changed.returncode == 1 and "1 failed, 2 passed" in changed.stdout, changed.stdout
    assert "text/html" in changed.stdout and "[1, 9, 3]" in changed.stdout


@pytest.mark.slow
def test_run_leaves_the_notebook_unchanged_if_a_cell_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "fails.ipynb"
    nbformat.write(notebook(ran("1 / 0")), path)
    before = path.read_text("utf-8")
    assert main(["run", str(path)]) == 1
    said = capsys.readouterr().err
    assert "ZeroDivisionError" in said and "fails.ipynb" in said
    assert path.read_text("utf-8") == before


@pytest.mark.slow
def test_run_stops_a_cell_that_takes_too_long(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "slow.ipynb"
    nbformat.write(notebook(ran("import time; time.sleep(60)")), path)
    assert main(["run", str(path), "--cell-timeout", "1"]) == 1
    assert "longer than 1 s" in capsys.readouterr().err


@pytest.mark.slow
def test_backend_and_device_may_differ_between_machines_and_nothing_else(tmp_path: Path) -> None:
    """A notebook stored on a CPU passes on a GPU machine; one whose number of ranks differs does not."""
    path = tmp_path / "backend.ipynb"
    stored = {"4 ranks on gloo (CPU): no GPU here": "4 ranks on nccl: a GPU each", "gloo on cpu": "nccl on cuda:3",
              "6 ranks on gloo (CPU): no GPU here": "5 ranks on nccl: a GPU each"}
    cells = [ran(f"print({now!r})", stream(f"{then}\n")) for then, now in stored.items()]
    nbformat.write(new_notebook(cells=cells), path)
    said = nbval(path, "--nbval-sanitize-with", str(ROOT / "nbval_sanitize.cfg")).stdout
    assert "1 failed, 2 passed" in said and "6 ranks" in said, said


@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix", reason="zmq has sockets in folders on Linux and macOS")
def test_no_kernel_of_the_books_notebooks_waits_for_a_port(tmp_path: Path) -> None:
    connection = "import json\nfrom ipykernel import get_connection_file\nwith open(get_connection_file()) as file:\n" \
                 "    found = json.load(file)\nprint(found['transport'])"
    nbformat.write(new_notebook(cells=[ran(connection, stream("ipc\n"))]), tmp_path / "kernel.ipynb")
    said = nbval(tmp_path / "kernel.ipynb", "-p", "conftest").stdout  # the root's
    assert "1 passed" in said, said


def told(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> str:
    """What a command that is refused says: one line."""
    assert main([*map(str, arguments)]) == 1
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    return said


@pytest.fixture
def labs(tmp_path: Path) -> Path:
    """A folder with one new lab."""
    assert main(["new-lab", "08_example", "--folder", str(tmp_path / "labs")]) == 0
    return tmp_path / "labs"


def test_a_new_lab_keeps_the_rules_and_has_no_exercise(labs: Path) -> None:
    lab = read_lab(labs / "08_example.ipynb")
    assert main(["lint", str(labs)]) == main(["normalise", "--check", str(labs)]) == 0
    assert not list(marked_wrongly(lab)) and points(lab) == {}
    assert [marks(cell)["kind"] for cell in code_cells(lab)] == ["setup", "parameters"]


@pytest.mark.slow
def test_new_exercises_keep_the_rules_and_their_stubs_fail(labs: Path, tmp_path: Path) -> None:
    path = labs / "08_example.ipynb"
    for arguments in (["ring_sum"], ["tree_sum", "--points", "3", "--depends", "1"]):
        assert main(["new-exercise", "08_example", *arguments, "--folder", str(labs)]) == 0
    lab = read_lab(path)
    assert points(lab) == {1: 2, 2: 3} and lab.metadata.lockstep.points == 5
    assert [len(checks(lab, number)) for number in (1, 2)] == [2, 2] and all(
        cell.outputs for number in (1, 2) for cell in checks(lab, number))
    assert [marks(cell)["depends"] for cell in code_cells(lab) if "depends" in marks(cell)] == [[1]]
    assert main(["lint", str(labs)]) == main(["normalise", "--check", str(labs)]) == 0
    assert grading(["lint", str(path)]) == 0
    assert grading(["release", str(path), "-o", str(tmp_path / "copies")]) == 0
    copy = read_lab(tmp_path / "copies" / path.name)
    assert not any(marks(cell).get("hidden") for cell in copy.cells)
    stub = next(cell.source for cell in code_cells(copy) if marks(cell)["id"] == "ring-sum")
    result = run(job(lab, 1, answers={"ring-sum": [stub]}), PATIENT, sandboxed=False)
    failed = next(cell for cell in result.cells if not cell["ok"])
    assert failed["id"] == "check-1"
    assert "This cell needs exercise 1: write its function, then run this cell again." in failed["traceback"]


@pytest.mark.slow
def test_an_exercise_is_added_before_the_closing_cells_of_a_lab(tmp_path: Path) -> None:
    path = tmp_path / "01_ranks.ipynb"
    path.write_bytes((ROOT / "labs" / path.name).read_bytes())
    assert main(["new-exercise", "01_ranks", "tree_sum", "--folder", str(tmp_path)]) == 0
    assert main(["lint", str(tmp_path)]) == main(["normalise", "--check", str(tmp_path)]) == 0
    before, after = read_lab(ROOT / "labs" / path.name), read_lab(path)
    assert [cell.source[:8] for cell in after.cells[-6:]] == [
        "## 7. Tr", "def tree", "from boo", "for worl", before.cells[-2].source[:8], before.cells[-1].source[:8]]
    assert after.metadata.lockstep.points == before.metadata.lockstep.points + 2


@pytest.mark.parametrize("arguments, said", [
    (["new-lab", "08_example"], "exists already"),
    (["new-lab", "example"], "two digits"),
    (["new-exercise", "09_other", "ring_sum"], "there is no lab '09_other'"),
    (["new-exercise", "08_example", "Ring sum"], "an exercise's name is its function's"),
    (["new-exercise", "08_example", "lambda"], "an exercise's name is its function's"),
    (["new-exercise", "08_example", "launch"], "uses the name launch already"),
    (["new-exercise", "08_example", "ring_sum", "--points", "two"], "points must be a whole number"),
    (["new-exercise", "08_example", "ring_sum", "--points", "0"], "points must be a whole number"),
    (["new-exercise", "08_example", "ring_sum", "--depends", "x"], "depends must be a whole number"),
    (["new-exercise", "08_example", "ring_sum", "--depends", "1"], "depends can't be [1]"),
])
def test_bad_input_is_refused_and_nothing_is_written(
        arguments: list[str], said: str, labs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = {path.name: path.read_bytes() for path in labs.iterdir()}
    capsys.readouterr()
    assert said in told(capsys, *arguments, "--folder", labs)
    assert before == {path.name: path.read_bytes() for path in labs.iterdir()}


@pytest.mark.parametrize("damage, said", [
    (lambda lab: lab.replace("SEED = 3", "NUMBER = 3"), "must set SEED"),
    (lambda lab: lab.replace("import launch, rank_device", "import launch"), "its setup needs rank_device"),
    (lambda lab: "{", "can't be read as a notebook"),
])
def test_a_lab_that_cannot_take_an_exercise_says_why(
        damage, said: str, labs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = labs / "08_example.ipynb"
    path.write_text(damage(path.read_text(encoding="utf-8")), encoding="utf-8")
    capsys.readouterr()
    assert said in told(capsys, "new-exercise", "08_example", "ring_sum", "--folder", labs)


# Pictures in few bytes

def filtered(pixels: np.ndarray, rules: list[int]) -> bytes:
    """A PNG of pixels (H, W, 4) whose rows have these filters, as the PNG specification defines them."""
    raw, num_channels = pixels.reshape(len(pixels), -1).astype(int), pixels.shape[2]
    above, rows = np.zeros(raw.shape[1], int), []
    for row, rule in zip(raw, rules):
        left, corner = (np.concatenate([np.zeros(num_channels, int), x[:-num_channels]]) for x in (row, above))
        three = np.stack([left, above, corner])
        nearest = three[np.abs(left + above - corner - three).argmin(0), np.arange(len(row))]
        rows.append(bytes([rule]) + ((row - (0 * row, left, above, (left + above) // 2, nearest)[rule]) % 256
                                     ).astype(np.uint8).tobytes())
        above = row
    parts = ((b"IHDR", struct.pack(">IIBBBBB", pixels.shape[1], len(pixels), 8, 6, 0, 0, 0)),
             (b"tEXt", b"Software\0a test"), (b"IDAT", zlib.compress(b"".join(rows), 1)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body)) for name, body in parts)


@pytest.mark.parametrize("seed", range(3))
def test_a_picture_of_any_filters_keeps_its_pixels_in_fewer_bytes(seed: int) -> None:
    drawn = np.random.default_rng(seed)
    pixels = np.full((40, 30, 4), 255, np.uint8)
    for _ in range(6):  # flat areas, as of a plot
        (x, y), (w, h) = drawn.integers(0, 25, 2), drawn.integers(3, 15, 2)
        pixels[y:y + h, x:x + w] = drawn.integers(0, 256, 4)
    picture = filtered(pixels, [*range(5)] * 8)
    smaller = shrunk(picture)
    assert len(smaller) < len(picture) and b"Software\0a test" in smaller and shrunk(smaller) == smaller
    for encoded in (picture, smaller):
        assert np.array_equal((image.imread(io.BytesIO(encoded)) * 255).round(), pixels)


def test_what_is_no_such_picture_is_left_alone() -> None:
    ramp = np.arange(4096, dtype=np.uint16).astype(np.uint8).reshape(16, 64, 4)  # filters make this smaller
    for other in (b"", b"GIF89a", filtered(ramp, [1] * 16), filtered(ramp, [0] * 16)):
        assert shrunk(other) == other


FIGURES = {path.stem: figures(path) for path in sorted((ROOT / "chapters").glob("[01]*.ipynb"))}
WEEKS = {week.number: week for week in weeks(SYLLABUS.read_text("utf-8"))}
MM = 36_000  # in PowerPoint's units
NARROW = 0.85  # the width of Calibri, the decks' type, to that of DejaVu Sans, by which tests measure


@pytest.mark.parametrize("number", WEEKS)
def test_a_week_shows_figures_of_its_chapters_by_their_title_and_place(number: int) -> None:
    week = WEEKS[number]
    stored = {(figure.page, figure.title, figure.anchor) for name in week.chapters() for figure in FIGURES[name]}
    assert week.shown() and {(shown.page, shown.label, shown.anchor) for shown in week.shown()} <= stored
    assert all(text.strip().endswith("?") for text in (week.fields["Question"], week.fields["Discuss"]))


def test_each_figure_has_a_title_and_a_widget_the_words_of_its_page() -> None:
    found = [figure for stored in FIGURES.values() for figure in stored]
    assert len(found) > 90 and all(figure.title for figure in found)
    assert all(bool(figure.words) == bool(figure.widget) == (figure.picture is None) for figure in found)
    ledgers = [figure for figure in found if figure.widget == LEDGER]
    for chapter, ledger in zip((*range(1, 11), 15), ledgers, strict=True):
        head, *rows = table_of(ledger)
        assert {len(row) for row in rows} == {len(head)} == {9} and rows[-1][0] == str(chapter)


def test_a_plot_of_a_slide_has_all_words_but_its_title() -> None:
    plots = [figure for listed in FIGURES.values() for figure in listed if figure.html and not figure.widget]
    assert len(plots) > 50
    for figure in plots:
        words, left = (re.findall(r"<text[^>]*>([^<]*)<", svg) for svg in (figure.html, figure.untitled))
        title = html.unescape(" ".join(word for word in words if word not in left)).replace("- ", "-")
        assert figure.title == title and len(left) < len(words)
        assert float(re.search(r'viewBox="0 (\S+) ', figure.untitled)[1]) > 15


@pytest.mark.parametrize("markdown, said", [
    ("For 61 % of 5 steps", "For 61\u00a0% of 5 steps"),
    (r"sends $2\tfrac{N-1}{N}n$, or $\frac78$ {cite}`li2020`.", "sends 2(N-1)/N n, or 7/8."),
    ("**Bold**, *soft*, `x * y * z` and [a link](01_ranks.ipynb#groups)", "Bold, soft, x * y * z and a link"),
    ("### Heading\n\n5 * 3 costs $5", "Heading\n\n5 * 3 costs $5")])
def test_markdown_becomes_plain_text(markdown: str, said: str) -> None:
    assert plain(markdown) == said


def drawn_height(text: str, points: float, width: int) -> float:
    """How high a text is in a box of this width, in PowerPoint's units, set in a wide type."""
    pixels = 10 * points
    font = ImageFont.truetype(str(Path(matplotlib.get_data_path(), "fonts/ttf/DejaVuSans.ttf")), pixels)
    room, num_lines = width / 12_700 * 10 - 144, 0
    for paragraph in text.split("\n"):
        num_lines, used = num_lines + 1, 0.0
        for word in paragraph.split(" "):
            length = font.getlength(word + " ")
            num_lines += used > 0 and used + length > room
            used = length if used + length > room else used + length
    return num_lines * 1.2 * points * 12_700


def assert_whole(deck: Any) -> None:
    """No box is empty, outside its slide or over another one, and no text is higher than its box."""
    for slide in deck.slides:
        boxes = [(s.left, s.top, s.left + s.width, s.top + s.height) for s in slide.shapes]
        for shape, (left, top, right, bottom) in zip(slide.shapes, boxes):
            assert 0 <= left < right <= deck.slide_width and 0 <= top < bottom <= deck.slide_height, shape.name
            if shape.has_text_frame:
                text, [size] = shape.text_frame.text, {r.font.size for p in shape.text_frame.paragraphs for r in p.runs}
                assert text.strip() and size.pt >= 12 and not re.search(r"\$|\{cite\}|\*\*|\]\(", text), text
                assert drawn_height(text, size.pt, shape.width) < shape.height + 4 * MM, text
            for row in shape.table.rows if shape.has_table else ():
                for cell, column in zip(row.cells, shape.table.columns):
                    width = column.width - cell.margin_left - cell.margin_right + 5 * MM  # `drawn_height` has margins
                    points = cell.text_frame.paragraphs[0].runs[0].font.size.pt
                    assert drawn_height(cell.text_frame.text, NARROW * points, width) < row.height, cell.text_frame.text
        for (a, b, c, d), (e, f, g, h) in combinations(boxes, 2):
            assert min(c, g) - max(a, e) < MM or min(d, h) - max(b, f) < MM, [s.name for s in slide.shapes]


def without_camera() -> contextlib.AbstractContextManager[None]:
    """In the place of a browser: none."""
    return contextlib.nullcontext()


@pytest.mark.slow
@pytest.mark.parametrize("number", WEEKS)
def test_a_deck_has_the_weeks_figures_in_order_and_nothing_overflows(
        number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a machine without a browser: plots as pictures, widgets as words."""
    pptx = pytest.importorskip("pptx", reason="python-pptx is not installed: make test installs it")
    monkeypatch.setattr(slides, "camera", without_camera)
    [path] = slides.make([number], tmp_path, "https://example.org/")
    week, deck = WEEKS[number], pptx.Presentation(str(path))
    assert_whole(deck)
    titles = [slide.shapes.title.text_frame.text for slide in deck.slides]
    wanted = [figure for name in week.chapters() for figure in sorted(FIGURES[name], key=lambda f: f.widget == LEDGER)]
    shown = ["The ledger" if figure.widget == LEDGER else figure.title for figure in wanted]
    assert titles[:len(wanted) + 3] == [f"Week {number}. {week.title}", *shown, "Discuss", "To do"]
    for figure, slide in zip(wanted, list(deck.slides)[1:]):
        pictures = [shape for shape in slide.shapes if shape.name == "figure"]
        assert [shape.image.blob for shape in pictures] == [figure.picture] * (figure.picture is not None)
        assert any(shape.has_table for shape in slide.shapes) == (figure.widget == LEDGER)
        foot = slide.shapes[-1].text_frame.paragraphs[0].runs[0]
        assert foot.hyperlink.address.startswith(f"https://example.org/chapters/{figure.page}.html")
        assert slide.notes_slide.notes_text_frame.text
    said = "\n".join(shape.text_frame.text for slide in deck.slides for shape in slide.shapes if shape.has_text_frame)
    assert "\\" not in said and "and others" not in said  # of BibTeX
    assert all(plain(asked.question)[1:] in said for asked in week.shown())
    assert plain(week.fields["Answer"]) not in said  # it stands in the notes
    assert plain(week.fields["Answer"]) == deck.slides[len(wanted) + 1].notes_slide.notes_text_frame.text


@pytest.mark.slow
def test_a_deck_has_photographs_of_its_widgets_with_words_for_screen_readers(tmp_path: Path) -> None:
    pptx = pytest.importorskip("pptx", reason="python-pptx is not installed: make test installs it")
    find_browser()
    assert main(["slides", "1", "-o", str(tmp_path)]) == 0
    deck = pptx.Presentation(str(tmp_path / "week_01.pptx"))
    assert_whole(deck)
    pictures = [shape for slide in deck.slides for shape in slide.shapes if shape.name == "figure"]
    wanted = [figure for figure in FIGURES["01_ranks"] if figure.widget != LEDGER]
    for figure, picture in zip(wanted, pictures, strict=True):
        told = picture._element.nvPicPr.cNvPr.get("descr")
        assert told.startswith(figure.title) and all(line in told for line in figure.words)
        with Image.open(io.BytesIO(picture.image.blob)) as image:
            assert image.width > 700 and len(image.convert("RGB").getcolors(1 << 24)) > 20  # something is drawn
            assert not figure.widget or image.width > 1.6 * image.height  # stacked, its letters would be half as large


def share(picture: bytes, color: tuple[int, int, int]) -> float:
    """How much of a picture is of this colour, in thousandths."""
    with Image.open(io.BytesIO(picture)) as image:
        near = np.abs(np.asarray(image.convert("RGB")).astype(int) - color).max(axis=2) < 8
    return 1000 * float(near.mean())


@pytest.mark.slow
def test_a_photograph_of_a_plot_has_all_its_marks() -> None:
    find_browser()
    [plot] = [figure for figure in FIGURES["13_slow_jobs"] if figure.title == "Published steps in bf16"]
    with camera() as take:
        photograph = take(plot, 2.0)
    for color in ((0x9A, 0x6F, 0xC4), (0xC8, 0x61, 0x2E), (0x3D, 0x9A, 0x6D)):  # those that are drawn as marks alone
        assert 0.7 < share(photograph, color) / share(plot.picture, color) < 1.6


def test_slides_of_no_week_and_without_their_package_get_one_sentence(
        tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert main(["slides", "13", "-o", str(tmp_path)]) == 1
    assert capsys.readouterr().err == "The syllabus has weeks 1 to 12, and no week 13.\n"
    monkeypatch.setitem(sys.modules, "pptx", None)
    monkeypatch.setattr(slides, "camera", without_camera)
    assert main(["slides", "1", "-o", str(tmp_path)]) == 1
    assert capsys.readouterr().err == f"{slides.MISSING}\n"


@pytest.mark.parametrize("document", ["CONTRIBUTING.md", "chapters/92_syllabus.md"])
def test_commands_in_the_documents_can_be_read_by_the_parser(document: str) -> None:
    text = (ROOT / document).read_text("utf-8")
    commands = re.findall(r"python -m book\.authoring (picture\b|\w+ [^`\n]+)", text)  # others are only named
    commands += re.findall(r"\blockstep (slides\b[^`\n]*)", text)
    assert commands
    for command in commands:
        parser().parse_args(command.split())
