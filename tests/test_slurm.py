"""The job script of chapter 12, run by a real Slurm cluster of two nodes: sbatch, srun, two agents, four ranks."""
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests.slurm import NoSlurm, cluster
from tests.test_chapters import cells
from tests.website import ROOT

pytestmark = pytest.mark.full
READS = ["examples/slurm/*", "examples/report_ranks.py", "chapters/12_beyond_one_machine.ipynb"]
SCRIPT, PROGRAM = ROOT / "examples" / "slurm" / "job.sbatch", ROOT / "examples" / "report_ranks.py"
LIMIT_S = 240
LINE = re.compile(r"rank (\d) of 4, local rank (\d), node (n\d), sum 4")


@pytest.fixture(scope="module")
def slurm():
    folder = Path(tempfile.mkdtemp(prefix="slurm", dir="/tmp"))  # a socket's path has to be short
    try:
        with cluster(folder) as environment:
            yield environment
    except NoSlurm as reason:
        pytest.skip(str(reason))
    finally:
        shutil.rmtree(folder)


def submitted(slurm, folder, program):
    """What a job printed, and how sbatch ended. The nodes are one machine, so it says where the store is."""
    environment = {**slurm, "PYTHON": sys.executable, "FIRST": "127.0.0.1", "LOCAL_ADDR": "127.0.0.1",
                   "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(["sbatch", "--wait", f"--output={folder}/job.out", str(SCRIPT), str(program)],
                          env=environment, cwd=folder, capture_output=True, text=True, timeout=LIMIT_S)
    return (folder / "job.out").read_text(), done.returncode


def test_a_job_spans_two_nodes(slurm, tmp_path):
    told, status = submitted(slurm, tmp_path, PROGRAM)
    ranks = sorted(LINE.findall(told))
    assert status == 0, told
    assert [(rank, local) for rank, local, _ in ranks] == [("0", "0"), ("1", "1"), ("2", "0"), ("3", "1")]
    assert ranks[0][2] == ranks[1][2] != ranks[2][2] == ranks[3][2]


def test_a_rank_that_fails_ends_the_job(slurm, tmp_path):
    failing = tmp_path / "fails.py"
    failing.write_text("import os, sys, time\nif os.environ['RANK'] == '3':\n    sys.exit(5)\ntime.sleep(200)\n")
    told, status = submitted(slurm, tmp_path, failing)
    assert status != 0 and "exitcode  : 5" in told, told


def test_the_chapter_shows_the_script_as_it_is():
    """But for the comments of its options."""
    shown = "\n".join(cells("12_beyond_one_machine", "markdown"))
    lines = [line for line in SCRIPT.read_text().splitlines() if line]
    bare = {re.sub(r"\s+# .*", "", line) for line in shown.splitlines()}
    assert [line for line in lines if line not in bare] == []
