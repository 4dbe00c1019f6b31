"""The programs in examples/ under torchrun: killed in the middle and started again, their losses stay the same."""
from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import psutil
import pytest

from tests.website import ROOT

EXAMPLES = ROOT / "examples"
READS = ["examples/*.py"]
NUM_RANKS, SAVE_EVERY = 2, 3
PROGRAMS = ["train_ddp", pytest.param("train_fsdp", marks=pytest.mark.full)]


def command(program: str, folder: Path, *more: str) -> list[str]:
    arguments = ["--epochs", "2", "--workers", "1", "--precision", "float64", "--save-every", str(SAVE_EVERY),
                 "--checkpoint", str(folder / "checkpoint"), "--losses", str(folder / "losses")]
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={NUM_RANKS}",
            "--max-restarts=1", str(EXAMPLES / f"{program}.py"), *arguments, *more]


def started(line: Sequence[str]) -> subprocess.Popen[str]:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    return subprocess.Popen(line, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def finish(process: subprocess.Popen[str]) -> str:
    told, _ = process.communicate(timeout=240)
    assert process.returncode == 0, told[-3000:]
    return told


def losses(folder: Path) -> list[tuple[tuple[int, int], str]]:
    """The lines of a run: ((epoch, step), loss as it was printed, to the last digit)."""
    path = folder / "losses"
    lines = [line.split() for line in path.read_text().splitlines()] if path.exists() else []
    return [((int(epoch), int(step)), loss) for epoch, step, loss in lines]


def ranks_of(process: subprocess.Popen[str], program: str) -> list[psutil.Process]:
    """The rank processes that a torchrun has started, without the processes that load their data."""
    return [child for child in psutil.Process(process.pid).children() if f"{program}.py" in " ".join(child.cmdline())]


@pytest.mark.slow
@pytest.mark.parametrize("program", PROGRAMS)
def test_a_rank_killed_in_the_middle_changes_no_loss(program: str, tmp_path: Path) -> None:
    """torchrun ends the other rank and starts both anew; they redo the steps since the checkpoint, bit for bit."""
    folders = [tmp_path / name for name in ("undisturbed", "killed")]
    for folder in folders:
        folder.mkdir()
    finish(started(command(program, folders[0])))
    whole = losses(folders[0])
    process = started(command(program, folders[1]))
    while len(losses(folders[1])) < 2 * SAVE_EVERY + 2:
        assert process.poll() is None
        time.sleep(0.02)
    family = psutil.Process(process.pid).children(recursive=True)
    ranks_of(process, program)[-1].send_signal(signal.SIGKILL)
    finish(process)
    killed = losses(folders[1])
    assert dict(killed) == dict(whole) and len(whole) == len(dict(whole)), "a step has one loss"
    again = [place for number, (place, _) in enumerate(killed) if place in dict(killed[:number])]
    assert again and len(again) <= len(whole) - 2 * SAVE_EVERY, "some steps are repeated, those before a checkpoint not"
    assert all(killed[number] in whole for number in range(len(killed)))
    assert not psutil.wait_procs(family, timeout=10)[1], "nothing is left behind"


@pytest.mark.slow
def test_a_checkpoint_of_another_world_size_is_refused_in_a_sentence(tmp_path: Path) -> None:
    line = command("train_ddp", tmp_path)
    line[line.index("--epochs") + 1] = "1"
    finish(started(line))
    line[line.index(f"--nproc-per-node={NUM_RANKS}")] = "--nproc-per-node=1"
    line[line.index("--max-restarts=1")] = "--max-restarts=0"
    line[line.index("--epochs") + 1] = "2"
    told, _ = started(line).communicate(timeout=240)
    assert "is of 2 ranks: start as many, or name another --checkpoint" in told
