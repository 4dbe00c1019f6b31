"""The normal form, the lint and the runner for notebooks, and labs that are begun by a command."""
from __future__ import annotations

import io
import os
import struct
import subprocess
import sys
import zlib
from pathlib import Path

import nbformat
import numpy as np
import pytest
from matplotlib import image
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

from book.authoring.__main__ import main
from book.authoring.lint import lint
from book.authoring.normalise import WIDGET_VIEW, differences, normal_text
from book.authoring.notebooks import NotebookError, find, parse
from book.authoring.png import shrunk
from book.grading.__main__ import main as grading
from book.grading.lab import checks, code_cells, job, marks, points, read_lab
from book.grading.lint import marked_wrongly
from book.grading.reference import PATIENT
from book.grading.run import PYTEST, run
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
