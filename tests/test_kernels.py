"""Kernels: a forked one is like a fresh one, none outlives its run, and labs pass beside busy loops."""
from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import nbformat
import psutil
import pytest
from nbformat.v4 import new_code_cell, new_notebook, new_output

from book.authoring.normalise import KERNELSPEC
from book.grading.trial import solution
from tests.answers import LABS
from tests.busy import busy, verdict
from tests.kernels import CAN_FORK
from tests.stress import survivors
from tests.website import ROOT



CELLS = {
    "import os\nprint(os.getcwd() == FOLDER, __name__, 'torch' in globals())": "True __main__ False\n",
    "import beside\nprint(beside.NAME)": "a module beside the notebook\n",
    "print(os.getpid(), file=open('pid', 'w'))": None,
    "from book.launch import launch\n\ndef rank():\n    import os\n    return os.environ['RANK']\n\n"
    "run = launch(rank, 2)\nprint(list(run))": "2 ranks on gloo (CPU): no GPU here\n['0', '1']\n",
    "import signal\nprint(signal.getsignal(signal.SIGINT) is not signal.SIG_IGN)": "True\n",
}


def nbval(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "-c", ROOT / "pyproject.toml", "--rootdir", ROOT, "--nbval", "-q",
               *options, "-p", "conftest", folder / "a.ipynb"]
    return subprocess.run(list(map(str, command)), cwd=ROOT, text=True, capture_output=True, timeout=240)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a notebook whose outputs are those of a fresh kernel, and a module that it imports."""
    cells = []
    for number, (source, text) in enumerate(CELLS.items(), 1):
        outputs = [new_output("stream", name="stdout", text=text)] if text else []
        source = source.replace("FOLDER", repr(str(tmp_path)))
        cells.append(new_code_cell(source, execution_count=number, outputs=outputs))
    nbformat.write(new_notebook(cells=cells, metadata={"kernelspec": KERNELSPEC}), tmp_path / "a.ipynb")
    (tmp_path / "beside.py").write_text("NAME = 'a module beside the notebook'\n")
    return tmp_path


@pytest.mark.slow
@pytest.mark.skipif(not CAN_FORK, reason='kernels are forked on Linux')
@pytest.mark.parametrize("options", [(), ("--fresh-kernels",)], ids=["forked", "fresh"])
def test_a_forked_kernel_looks_like_a_fresh_one(folder: Path, options: tuple[str, ...]) -> None:
    run = nbval(folder, *options)
    assert run.returncode == 0, run.stdout
    assert not psutil.pid_exists(int((folder / "pid").read_text())), "the kernel has ended with the run"


@pytest.mark.skipif(not CAN_FORK, reason='kernels are forked on Linux')
@pytest.mark.slow
def test_an_output_that_differs_fails_in_a_forked_kernel_too(folder: Path) -> None:
    path = folder / "beside.py"
    path.write_text("NAME = 'another one'\n")
    run = nbval(folder)
    assert run.returncode == 1 and "1 failed, 4 passed" in run.stdout, run.stdout


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != 'linux', reason='reads /proc')
def test_nothing_is_left_of_killed_and_restarted_kernels_and_interrupted_launches():
    left = survivors(times=1, seed=7)
    assert left == {"killed kernels": [0], "restarted kernels": [0], "interrupted launches": [0]}


LAB = LABS["01_ranks"]


@pytest.mark.slow
def test_a_solution_passes_beside_busy_loops_and_a_wrong_answer_does_not():
    right = solution(LAB, 1)
    with busy(2):
        assert verdict(LAB, 1, right) is None
        assert "CheckFailed" in verdict(LAB, 1, right.replace("dist.send(buffer,", "dist.send(buffer + 1,"))
