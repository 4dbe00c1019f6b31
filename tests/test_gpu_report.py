"""What `make gpu` runs, as far as a machine without a GPU can: its notebooks, its limits, its parts and its report."""
from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import nbformat
import pytest
import torch
from nbformat.v4 import new_code_cell, new_notebook, new_output

from benchmarks.gpu import __main__ as command
from benchmarks.gpu import hanging, memory, notebooks, overlap, ring, sharding, speed, traces
from benchmarks.gpu.bounded import Ended, end_all, run_bounded
from benchmarks.gpu.machine import Gpu, Machine
from benchmarks.gpu.part import measured
from benchmarks.gpu.report import Report
from benchmarks.report import Findings
from book.launch import api
from tests.website import ROOT

DONE = Ended(0, "", 1.0)
MACHINE = Machine("Measured here.", "2.13.0", "13.0", "2.29.3", "580.1", [Gpu("NVIDIA H200", 140 << 30, "9.0")] * 4)
LAUNCH = """import torch.distributed as dist
from book.launch import launch, rank_device


def number():
    rank_device()
    dist.init_process_group()
    return dist.get_rank()


print(list(launch(number, 2)))"""


def cell(source: str, stored: str = "") -> Any:
    """A cell that has run, with what it printed."""
    outputs = [new_output("stream", name="stdout", text=stored)] if stored else []
    return new_code_cell(source, execution_count=1, outputs=outputs)


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder inside the repository: pytest then takes the book's conftest.py for the notebooks in it."""
    (ROOT / "_build").mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=ROOT / "_build") as name:
        yield Path(name)


def stored(folder: Path, *cells: Any) -> str:
    """Write a notebook of these cells; returns its path in the repository."""
    nbformat.write(new_notebook(cells=list(cells)), folder / "tried.ipynb")
    return str((folder / "tried.ipynb").relative_to(ROOT))


def noted(cell: int, outcome: str, launches: Sequence[tuple[int, str]] = ()) -> list[dict[str, Any]]:
    """The notes of one cell that ran to its end."""
    return [{"event": "start", "cell": cell, "source": "launch(f, 2)\nmore"},
            {"event": "end", "cell": cell, "outcome": outcome, "launches": launches,
             "why": ["ValueError: no"] if outcome == "failed" else []}]


@pytest.mark.slow
def test_cells_are_compared_whatever_device_their_stored_outputs_came_from(folder: Path) -> None:
    notebook = stored(folder, cell(LAUNCH, "2 ranks on nccl: a GPU each\n[0, 1]\n"), cell("print('two')", "one\n"),
                      cell("def refuse():\n    raise ValueError('no')\nlaunch(refuse, 1)"), cell("print(3)", "3\n"))
    verdict = notebooks.check(notebook, num_gpus=0)
    assert (verdict.num_cells, verdict.num_passed, verdict.launches) == (4, 2, [(2, "gloo"), (1, "gloo")])
    assert [failure.cell for failure in verdict.failures] == [1, 2]
    differs, raises = ("\n".join(failure.why) for failure in verdict.failures)
    assert "Cell outputs differ" in differs and "'one\\n'" in differs
    assert "RankError: rank 0 failed in cell line 2: raise ValueError('no')" in raises


@pytest.mark.slow
def test_a_notebook_that_hangs_is_ended_and_reported(folder: Path) -> None:
    notebook = stored(folder, cell("import time\ntime.sleep(600)"))
    [failure] = notebooks.check(notebook, num_gpus=0, limit_s=8).failures
    assert "ended after 8 s, the notebook's limit" in failure.why
    assert end_all() == 0


DETACHED = ("import subprocess, sys; sleeper = [sys.executable, '-c', 'import time; time.sleep(600)']; "
            "print('pid', subprocess.Popen(sleeper, start_new_session=True).pid)")


@pytest.mark.slow
def test_detached_children_of_a_program_are_ended_too() -> None:
    ended = run_bounded("timeit", ["-n", "1", "-r", "1", DETACHED], limit_s=60)
    pid = int(ended.output.split()[1])
    assert ended.status == 0 and ended.num_left == 0
    with pytest.raises(OSError):  # it is gone, or dead and not reaped
        Path(f"/proc/{pid}/environ").read_bytes()


@pytest.mark.slow
def test_a_limit_ends_a_program() -> None:
    ended = run_bounded("timeit", ["-n", "1", "-r", "1", "import time; time.sleep(600)"], limit_s=1)
    assert ended.status is None and ended.num_left == 0


@pytest.mark.slow
def test_the_command_rehearses_a_part_and_writes_its_report(tmp_path: Path) -> None:
    """As a program of its own: it hides the machine's GPUs from itself."""
    program = subprocess.run([sys.executable, "-m", "benchmarks.gpu", "--rehearse", "--only", "launching", "--out",
                              str(tmp_path)], cwd=ROOT, text=True, capture_output=True, timeout=300)
    assert program.returncode == 0, program.stderr
    data = json.loads((tmp_path / "report.json").read_text("utf-8"))
    launches, inside = data["findings"][0]["tables"]
    assert [row[:2] for row in launches["rows"]] == [["1", "gloo"], ["2", "gloo"]]
    assert [row[:2] for row in inside["rows"]] == [["1", "gloo"], ["2", "gloo"]]
    assert (data["rehearsal"], data["failed"], data["verdicts"], data["machine"]["gpus"]) == (True, False, [], [])
    text = (tmp_path / "report.md").read_text("utf-8")
    assert "a rehearsal" in text and "**Inside a rank**" in text and "| 2 | gloo |" in text


@pytest.mark.slow
@pytest.mark.parametrize(("part", "rows"), [("ring", [3]), ("overlap", [6, 2]), ("recording", [2, 4, 1]),
                                            ("speed", [1]), ("traces", [2]), ("sharding", [3]), ("hanging", [3])])
def test_every_part_measures_what_it_lists(part: str, rows: list[int]) -> None:
    found = measured(part, num_gpus=0, limit_s=200)
    assert not found.left_out and [len(table.rows) for table in found.tables] == rows
    assert all(len(row) == len(table.columns) for table in found.tables for row in table.rows)


@pytest.mark.parametrize("part", [hanging, overlap, ring, sharding, traces])
def test_a_part_that_needs_more_gpus_says_so(part: ModuleType) -> None:
    found = part.measure(num_gpus=1)
    assert not found.tables and "it needs 2" in found.left_out[0]


def test_memory_has_no_rehearsal_and_says_so() -> None:
    found = memory.measure(2, **memory.REHEARSAL)
    assert not found.tables and "it needs a GPU" in found.left_out[0]


@pytest.mark.parametrize(("name", "tera"), [
    ("NVIDIA H100 80GB HBM3", 989), ("NVIDIA A100-SXM4-80GB", 312), ("NVIDIA GeForce RTX 4090", 165.2),
    ("NVIDIA L40S", 362.05), ("NVIDIA L40", None), ("NVIDIA GH200 480GB", None), ("", None)])
def test_the_peak_of_a_gpu_is_found_by_what_its_driver_calls_it(name: str, tera: float | None) -> None:
    assert speed.peak_flops_per_s(name) == (tera and tera * 1e12)


@pytest.mark.slow
def test_a_part_that_fails_is_reported_with_its_error() -> None:
    [told] = measured("nothing", num_gpus=0, limit_s=60).left_out
    assert told.startswith("nothing: ended with status 1") and "ModuleNotFoundError" in told


@pytest.mark.slow
def test_without_a_gpu_it_says_so_in_a_line_and_runs_nothing(monkeypatch: pytest.MonkeyPatch,
                                                             capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert command.main([]) == 0
    [line] = capsys.readouterr().out.splitlines()
    assert "NVIDIA" in line and "`python -m benchmarks.gpu --rehearse`" in line


def test_a_launch_that_took_the_wrong_backend_is_a_failure() -> None:
    """The stored outputs cannot say so: the comparison lets the backend differ."""
    notes = [*noted(0, "passed", [(4, "nccl"), (8, "gloo")]), *noted(1, "passed", [(2, "gloo")])]
    [failure] = notebooks.judged("chapters/10_planner.ipynb", notes, DONE, num_gpus=4, limit_s=1).failures
    assert failure == notebooks.Failure(1, ["2 ranks on gloo, with 4 GPUs"])


def test_cells_that_did_not_run_are_not_passed() -> None:
    verdict = notebooks.judged("chapters/10_planner.ipynb", noted(0, "passed"), Ended(2, "ran out", 1.0), 0, 1)
    cells = sum(cell.cell_type == "code" for cell in nbformat.read(ROOT / "chapters/10_planner.ipynb", 4).cells)
    assert verdict.failures == [notebooks.Failure(None, [f"only 1 of {cells} cells passed", "ran out"])]


def test_the_cell_that_ended_the_notebook_is_named() -> None:
    notes = [*noted(0, "passed"), *noted(1, "failed")[:1]]
    for status, how in ((None, "ended after 9 s, the notebook's limit"), (-11, "pytest ended in this cell")):
        [failure] = notebooks.judged("chapters/10_planner.ipynb", notes, Ended(status, "", 9.0), 0, 9).failures
        assert failure == notebooks.Failure(1, [how, "it begins: launch(f, 2)"])


def test_the_report_fails_with_a_notebook_and_quotes_it(tmp_path: Path) -> None:
    verdict = notebooks.Verdict("labs/03_ring_all_reduce.ipynb", 2, 1, 5.0, [(4, "nccl"), (8, "gloo"), (2, "nccl")],
                                [notebooks.Failure(1, ["Cell outputs differ", "```"])])
    report = Report(MACHINE, False, [verdict], [Findings(left_out=["ring: it needs 2"])])
    assert report.failed and not Report(MACHINE, False).failed
    report.write(tmp_path)
    text = (tmp_path / "report.md").read_text("utf-8")
    assert "| `labs/03_ring_all_reduce.ipynb` | 2 | 1 | 1 | nccl: 2, 4; gloo: 8 | 5 s |" in text
    assert "code cell 1\n\n~~~~text\nCell outputs differ\n```\n~~~~" in text
    assert "| GPU 3 | NVIDIA H200, 140 GB, compute capability 9.0 |" in text and "Left out: ring: it needs 2" in text
    assert json.loads((tmp_path / "report.json").read_text("utf-8"))["failed"]


@pytest.mark.parametrize(("arguments", "chosen", "parts"), [
    (["--only", "labs/03", "ring"], ["labs/03_ring_all_reduce.ipynb"], ["ring"]),
    (["--measure"], [], ["launching", "ring", "speed", "overlap", "traces", "sharding", "memory", "recording",
                         "hanging"]),
    (["--notebooks", "--only", "chapters/0", "labs/07"], 10, []),
])
def test_options_choose_what_runs(arguments: list[str], chosen: list[str] | int, parts: list[str]) -> None:
    options = command.parse(arguments)
    assert chosen in (options.chosen, len(options.chosen)) and list(options.parts) == parts


@pytest.mark.parametrize(("hidden", "backend"), [
    ({}, "nccl"), ({"CUDA_VISIBLE_DEVICES": "2,3"}, "nccl"), ({"CUDA_VISIBLE_DEVICES": ""}, "gloo"),
    ({"CUDA_VISIBLE_DEVICES": 3}, "gloo"), ({"CUDA_VISIBLE_DEVICES": "1,-1,2"}, "gloo"),
])
def test_gpus_that_a_launch_hides_from_its_ranks_are_not_counted(monkeypatch: pytest.MonkeyPatch,
                                                                 hidden: dict[str, Any], backend: str) -> None:
    """What torch would answer on a machine with 4 GPUs."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    assert api._backend(2, hidden)[0] == backend


def test_an_empty_choice_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        command.parse(["--only", "labs/03", "labs/99"])
    assert "nothing to run begins with 'labs/99'" in capsys.readouterr().err


@pytest.mark.parametrize(("driver", "cuda", "told"), [
    (None, "13.0", "no NVIDIA GPU"), ("580.1", None, "built without CUDA"), ("580.1", "13.0", "sees no GPU"),
])
def test_the_reason_for_no_gpu_is_reported(driver: str | None, cuda: str | None, told: str) -> None:
    assert told in Machine("Measured here.", "2.13.0", cuda, None, driver).why_not
