"""The page on starting ranks starts its program with launchers: one group is formed, and nothing stays behind."""
import os
import re
import signal
import socket
import sys
import threading
import time

import pytest

from tests.test_chapters import cells
from tests.test_launch_processes import LIMIT_S, PROGRAMS, wait_until_gone

pytestmark = pytest.mark.slow
READS = ["chapters/81_starting_ranks.ipynb", "tests/programs/*.py"]

TORCHRUN = "-m torch.distributed.run"
LINE = re.compile(r"rank (\d) of 4, local rank (\d) of 2, node (\d), sum 4, arguments \[\]")


@pytest.fixture(scope="module")
def chapter():
    """What the page defines to put a program into a file and run commands on it."""
    namespace = {"os": os, "time": time}
    for source in cells("81_starting_ranks", "code"):
        if source.startswith("JOB =") or "def run_program(" in source:
            exec(source, namespace)
    return namespace


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


@pytest.mark.full
def test_two_agents_form_one_group(chapter):
    agent = (f"{TORCHRUN} --nnodes=2 --nproc-per-node=2 --rdzv-id=test --rdzv-backend=c10d "
             f"--rdzv-endpoint=127.0.0.1:{free_port()}")
    agents = chapter["run_program"](chapter["JOB"], agent, agent, timeout_s=LIMIT_S, CUDA_VISIBLE_DEVICES="")
    found = [[tuple(map(int, match)) for match in LINE.findall(output)] for output, _ in agents]
    assert sorted(found[0] + found[1]) == [(0, 0, 0), (1, 1, 0), (2, 0, 1), (3, 1, 1)], agents
    assert [len({node for _, _, node in ranks}) for ranks in found] == [1, 1]  # an agent's ranks are on its own node


@pytest.mark.full
def test_nodes_are_numbered_by_hand_in_the_static_form(chapter):
    agent = (f"{TORCHRUN} --nnodes=2 --nproc-per-node=2 --node-rank={{}} --master-addr=127.0.0.1 "
             f"--master-port={free_port()}")
    agents = chapter["run_program"](chapter["JOB"], agent.format(1), agent.format(0), timeout_s=LIMIT_S,
                                    CUDA_VISIBLE_DEVICES="")
    assert [{int(node) for _, _, node in LINE.findall(output)} for output, _ in agents] == [{1}, {0}], agents


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.usefixtures("interruptible")
def test_an_interrupted_cell_leaves_no_process(chapter, tmp_path):
    def interrupt():
        end_s = time.monotonic() + LIMIT_S
        while len(os.listdir(tmp_path)) < 4 and time.monotonic() < end_s:
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGINT)

    program = (PROGRAMS / "wait_to_be_ended.py").read_text()
    threading.Thread(target=interrupt, daemon=True).start()
    with pytest.raises(KeyboardInterrupt):
        chapter["run_program"](program, f"{TORCHRUN} --standalone --nproc-per-node=2", "", timeout_s=2 * LIMIT_S,
                               PIDS=str(tmp_path))
    ranks = [int(name) for name in os.listdir(tmp_path)]
    assert len(ranks) == 4
    wait_until_gone(ranks)
