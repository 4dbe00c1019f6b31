"""Answers that are not written yet, in real kernels: each cell that needs one says so in a line, and the rest runs."""
from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from jupyter_core.utils import run_sync
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError
from nbformat.v4 import new_code_cell, new_notebook

from book.checks.unwritten import FIRST, STUB, names_made, names_read
from book.grading import release
from book.grading.lab import code_cells, marks, read_lab
from tests.kernels import FOR_NBCLIENT
from tests.website import ROOT

MODULES = {path.stem for path in (ROOT / "book/checks").glob("*.py")}  # a call of theirs changes nothing there
LABS = sorted(path.stem for path in (ROOT / "labs").glob("*.ipynb"))
FASTEST = "14_frameworks"  # 4 s, others 13 to 20
NEEDS_NO_ANSWER = ("play-simulated-", "measure-3")  # nbval runs these cells, which take the longest
LINE = re.compile(r"Not written yet\. This cell needs exercise \d+: write its function, then run this cell again\.")
WRITTEN = 'raise NotImplementedError("exercise 3: write this function, then run the cell")'


def run_all(notebook: Any, folder: Path) -> Any:
    """Run all cells as JupyterLab does, which stops at the first that the kernel calls an error; returns them."""
    manager = FOR_NBCLIENT(kernel_name="python3", transport="ipc", ip=str(folder / "kernel"))
    client = NotebookClient(notebook, km=manager, timeout=300, resources={"metadata": {"path": str(folder)}})
    try:
        client.execute()
    finally:
        run_sync(manager.shutdown_kernel)(now=True)  # nbclient leaves it to whoever made the manager
    return notebook.cells


def run_cells(folder: Path, *sources: str) -> Any:
    """Run a notebook of these cells behind one that has answers that are not written reported."""
    first = "from book.checks import unwritten\nunwritten.install()"
    return run_all(new_notebook(cells=[new_code_cell(text) for text in (first, *sources)]), folder)


def shown(cell: Any) -> list[str]:
    """What a cell's errors show."""
    return ["\n".join(output.traceback) for output in cell.outputs if output.output_type == "error"]


@pytest.mark.slow
@pytest.mark.parametrize("name", [FASTEST, *(pytest.param(lab, marks=pytest.mark.slow)
                                             for lab in LABS if lab != FASTEST)])
def test_an_untouched_lab_runs_to_its_end(name: str, tmp_path: Path) -> None:
    copy = release.released(read_lab(ROOT / "labs" / f"{name}.ipynb"), f"{name}.ipynb")
    copy.cells = [cell for cell in copy.cells if not marks(cell).get("id", "").startswith(NEEDS_NO_ANSWER)]
    cells = [cell for cell in run_all(copy, tmp_path) if cell.cell_type == "code"]
    assert all(cell.execution_count for cell in cells)
    errors = [text for cell in cells for text in shown(cell)]
    assert errors and [text for text in errors if not LINE.fullmatch(text)] == []
    checks = [marks(cell)["id"] for cell in cells if marks(cell)["kind"] == "check" and not shown(cell)]
    assert checks == [], "a check that passes without an answer"


@pytest.mark.slow
def test_what_a_cell_would_have_made_is_missed_until_it_is_made(tmp_path: Path) -> None:
    stub = f"def answer():\n    {WRITTEN}"
    *cells, again = run_cells(tmp_path, stub, "made = answer()\nother = 1", "print(made)", "made = 2", "print(made)",
                              "def answer():\n    return 3", "print(answer())")
    assert [shown(cell) for cell in cells if shown(cell)] == [
        ["Not written yet. This cell needs exercise 3: write its function, then run this cell again."]] * 2
    assert again.outputs[0].text == "3\n" and cells[5].outputs[0].text == "2\n"


@pytest.mark.slow
@pytest.mark.parametrize("source, name", [("1 / 0", "ZeroDivisionError"), ("print(nowhere)", "NameError"),
                                          ("raise NotImplementedError('later')", "NotImplementedError"),
                                          ("1 +", "SyntaxError")])
def test_other_errors_stop_the_run_with_their_traceback(source: str, name: str, tmp_path: Path) -> None:
    stub = f"def answer():\n    {WRITTEN}"
    with pytest.raises(CellExecutionError, match=name) as stopped:
        run_cells(tmp_path, stub, "made = answer()", source, "print('not reached')")
    assert "not reached" not in str(stopped.value) and source in str(stopped.value)


@pytest.mark.slow
@pytest.mark.parametrize("before, said", [
    ([], "AssertionError.*: run the cells above first (menu Run, Run All Above Selected Cell)"),
    (["setup"], "No cell has made `SEED` yet, which this check needs: run the cells above first (menu Run, Run All "
                "Above Selected Cell)."),
    (["setup", "seed"], "No cell has made `my_numbers` yet, which this check needs: run the cells above first (menu "
                        "Run, Run All Above Selected Cell).")])
def test_a_check_that_is_run_first_says_what_to_do(before: list[str], said: str, tmp_path: Path) -> None:
    """The last one fails in its ranks, and `launch` tells of it."""
    copy = release.released(read_lab(ROOT / "labs/01_ranks.ipynb"))
    lab = {marks(cell)["id"]: cell for cell in code_cells(copy)}
    cells = [lab[name] for name in before] + [lab["check-1"]]
    if before == ["setup"]:
        cells[-1].source = FIRST["check"] + "print(SEED)"
    with pytest.raises(CellExecutionError):
        run_all(new_notebook(cells=cells), tmp_path)
    (text,) = shown(cells[-1])
    if before:
        assert text == said
    else:
        assert re.search(r"AssertionError\S*: " + re.escape(said.partition(": ")[2]), text) and "NameError" not in text


@pytest.mark.slow
def test_a_slip_in_an_answer_is_not_taken_for_a_cell_that_has_not_been_run(tmp_path: Path) -> None:
    with pytest.raises(CellExecutionError, match="name 'tpyo' is not defined") as stopped:
        run_cells(tmp_path, "def answer():\n    return tpyo", FIRST["check"] + "answer()")
    assert "No cell has made" not in str(stopped.value)


@pytest.mark.slow
def test_a_hang_in_what_a_lab_has_given_is_told_at_the_learners_own_line(tmp_path: Path) -> None:
    given = ("import torch\nimport torch.distributed as dist\nfrom book.launch import launch\n\n"
             "def receive():\n    dist.recv(torch.zeros(1))")
    check = "def rank():\n    dist.init_process_group('gloo')\n    answer()\n\nlaunch(rank, 2, hang_s=1)"
    with pytest.raises(CellExecutionError) as stopped:
        run_cells(tmp_path, FIRST["setup"] + given, "def answer():\n    receive()", FIRST["check"] + check)
    assert re.search(r"wait in recv\S* .*at cell line 2: receive\(\)", str(stopped.value)), stopped.value


@pytest.mark.slow
def test_a_cell_that_stopped_midway_lacks_only_what_came_after(tmp_path: Path) -> None:
    stub = f"def answer():\n    {WRITTEN}"
    stopped = "runs, whole = {}, 5\nfor n in (1, 2):\n    runs[n] = answer()"
    *_, cell = run_cells(tmp_path, stub, stopped, "print(runs[2])")
    assert shown(cell) == ["Not written yet. This cell needs exercise 3: write its function, then run this cell again."]
    with pytest.raises(CellExecutionError, match="ZeroDivisionError"):
        run_cells(tmp_path, stub, stopped.replace("whole = {}, 5", "whole = {}, 0"), "1 / whole")


@pytest.mark.slow
def test_a_wrong_answer_gets_its_own_error_though_its_check_has_stopped_before(tmp_path: Path) -> None:
    check = "run = answer()\nassert run == 3, f'it is {run}, not 3'"
    cells = (f"def answer():\n    {WRITTEN}", check, check.replace("3", "4"), "def answer():\n    return 2", check)
    with pytest.raises(CellExecutionError, match="it is 2, not 3"):
        run_cells(tmp_path, *cells)


@pytest.mark.parametrize("cell, names", [
    ("print(a)\na = 1\nprint(a, b)", ["print", "a", "print", "b"]), ("a = a + 1", ["a"]),
    ("for n in ns:\n    run = f(n)\n    g(run)", ["ns", "f", "g"]),
    ("def f(x, *y):\n    z = w\n    return x, y, z", ["w"]),
    ("with open(p) as file:\n    file.read()\ntry:\n    pass\nexcept E as e:\n    h()", ["open", "p", "E", "h"])])
def test_the_names_that_a_cell_takes_from_others(cell: str, names: list[str]) -> None:
    assert names_read(cell) == names


@pytest.mark.parametrize("name", LABS)
def test_no_check_lacks_what_it_makes_itself(name: str) -> None:
    """Else a wrong answer would still be told that it is not written, once its check has stopped at the stub."""
    for cell in code_cells(read_lab(ROOT / "labs" / f"{name}.ipynb")):
        if marks(cell)["kind"] == "check" and not marks(cell).get("hidden"):
            assert names_made(cell.source).isdisjoint({*names_read(cell.source)} - MODULES), marks(cell)["id"]


def test_the_stub_is_the_one_that_students_get() -> None:
    message = release.STUB.format(indent="", exercise=7).partition('("')[2]
    found = STUB.search(f"NotImplementedError: {message}")
    assert found and found[1] == "7"


@pytest.mark.parametrize("cell, names", [
    ("a, (b, *c) = 1, (2, 3)\nx.y = 3", {"a", "b", "c"}), ("def f():\n    inner = 1\nclass C:\n    d = 1", {"f", "C"}),
    ("runs[1].x, y[2] = 1, 2\nlist.append(3)", {"y", "list"}),
    ("import a.b as c, d.e\nwith open(f) as g:\n    h: int = 1", {"c", "d", "g", "h"}), ("%magic", set())])
def test_the_names_that_a_cell_makes(cell: str, names: set[str]) -> None:
    assert names_made(cell) == names
