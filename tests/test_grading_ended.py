"""How a job ended is judged by what nbval and `launch` saw of its processes, never by words that it prints."""
import pytest
from nbformat.v4 import new_code_cell, new_notebook, new_output

from book.grading.grade import _killed
from book.grading.lab_schema import KEY
from book.grading.run import run
from book.grading.sandbox import Limits

WORDS = "Timeout of 3 seconds exceeded, Kernel died, Timed out, rank 1 was killed by SIGKILL"
LAUNCH = """import os, signal
import torch.distributed as dist
from book.launch import launch


def end():
    dist.init_process_group()
    {}


launch(end, 2)"""


def ended(source, cell_s=60):
    """How a job with this check ends, which should print "right"."""
    mark = {KEY: {"id": "check-1", "kind": "check", "exercise": 1}}
    outputs = [new_output("stream", name="stdout", text="right\n")]
    limits = Limits(cell_s=cell_s, wall_s=120)
    check = new_code_cell(source, metadata=mark, outputs=outputs, execution_count=1)
    return run(new_notebook(cells=[check]), limits, sandboxed=False)


@pytest.mark.slow
@pytest.mark.parametrize("source", [
    f"raise RuntimeError({WORDS!r})", pytest.param(f"print({WORDS!r})", marks=pytest.mark.full),
    pytest.param(f"print('right')\nprint({WORDS!r}, file=__import__('sys').stderr)", marks=pytest.mark.full)])
def test_words_alone_stop_no_job(source):
    result = ended(source)
    assert result.why is None and _killed(result) is None
    assert [cell["stopped"] for cell in result.cells] == [False]


@pytest.mark.slow
@pytest.mark.parametrize("source, cell_s, message", [
    ("import os\nos._exit(0)", 60, "the kernel died"), ("import time\ntime.sleep(60)", 3, "Timeout of 3 seconds")])
def test_a_kernel_that_ends_and_a_cell_that_takes_too_long_are_told_apart(source, cell_s, message):
    result = ended(source, cell_s)
    assert result.why == "time limit of a cell, or the kernel died"
    assert result.cells[0]["message"].startswith(message)


@pytest.mark.full
def test_a_folder_with_a_long_path_is_no_obstacle(tmp_path, monkeypatch):
    """There a socket would have no room for its name: neither the kernel's nor that of the ranks' server."""
    long = tmp_path / ("long" * 20)
    long.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(long))
    result = ended("import contextlib\nfrom book.launch import launch\nwith contextlib.redirect_stdout(None):\n"
                   "    run = launch(max, 2, 0, 1)\nprint('right' if list(run) == [1, 1] else 'wrong')")
    assert result.cells[0]["ok"], result.log


@pytest.mark.slow
@pytest.mark.parametrize("end, why", [("os.kill(os.getpid(), signal.SIGKILL)", "a rank was killed"),
                                      pytest.param(f"raise RuntimeError({WORDS!r})", None, marks=pytest.mark.full)])
def test_a_rank_is_killed_if_its_exit_status_says_so(end, why):
    result = ended(LAUNCH.format(end))
    assert result.why is None and not result.cells[0]["ok"]
    assert _killed(result) == why
