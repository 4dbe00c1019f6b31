"""The programs in examples/ under torchrun: killed in the middle and started again, their losses stay the same."""
from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Sequence
from pathlib import Path

import nbformat
import psutil
import pytest

from tests.website import ROOT

EXAMPLES = ROOT / "examples"
READS = ["examples/*.py", "chapters/82_training_with_ddp.ipynb"]
NUM_RANKS, SAVE_EVERY = 2, 4
PROGRAMS = ["train_ddp", "train_fsdp"]


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


def processes_of(folder: Path) -> list[psutil.Process]:
    """The processes that have this folder in their command line: torchruns, ranks, and what loads their data."""
    return [one for one in psutil.process_iter(["cmdline"]) if str(folder) in " ".join(one.info["cmdline"] or [])]


def kill_a_rank(process: subprocess.Popen[str], program: str, folder: Path) -> None:
    """Kill the last rank of a run that has saved twice, two steps or more after a checkpoint.

    On a loaded machine the run may be at the next checkpoint when a signal comes: so stop it, look, and only then kill.
    """
    while len(losses(folder)) < 2 * SAVE_EVERY:
        assert process.poll() is None
        time.sleep(0.01)
    last = ranks_of(process, program)[-1]
    while True:
        last.send_signal(signal.SIGSTOP)
        time.sleep(0.2)  # until the other rank waits for this one in the next all-reduce
        done = losses(folder)
        (_, step), _ = done[-1]
        if 2 <= (step + 1) % SAVE_EVERY:
            break
        last.send_signal(signal.SIGCONT)
        while len(losses(folder)) == len(done):
            assert process.poll() is None
    assert len(processes_of(folder)) >= 1 + NUM_RANKS, "processes are found by their folder"
    last.send_signal(signal.SIGKILL)


def ranks_of(process: subprocess.Popen[str], program: str) -> list[psutil.Process]:
    """The rank processes that a torchrun has started, without the processes that load their data."""
    return [child for child in psutil.Process(process.pid).children() if f"{program}.py" in " ".join(child.cmdline())]


@pytest.mark.full
@pytest.mark.parametrize("program", PROGRAMS)
def test_a_rank_killed_in_the_middle_changes_no_loss(program: str, tmp_path: Path) -> None:
    """torchrun ends the other rank and starts both anew; they redo the steps since the checkpoint, bit for bit."""
    process = started(command(program, tmp_path))
    kill_a_rank(process, program, tmp_path)
    finish(process)
    killed = losses(tmp_path)
    assert len(set(killed)) == len(dict(killed)), "a step has one loss"
    steps = [[step for epoch, step in dict(killed) if epoch == which] for which in (0, 1)]
    assert steps[0] == steps[1] == [*range(len(steps[0]))], "no step is left out"
    again = [place for number, (place, _) in enumerate(killed) if place in dict(killed[:number])]
    assert len(again) >= 2, "two steps or more are repeated: the second shows the momenta as well"
    assert len(again) <= len(dict(killed)) - 2 * SAVE_EVERY, "those before a checkpoint are not"
    assert not psutil.wait_procs(processes_of(tmp_path), timeout=10)[1], "nothing is left behind"


@pytest.mark.full
@pytest.mark.parametrize("program", PROGRAMS)
def test_a_run_with_a_killed_rank_ends_as_one_without(program: str, tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("undisturbed", "killed")]
    for folder in folders:
        folder.mkdir()
    finish(started(command(program, folders[0])))
    process = started(command(program, folders[1]))
    kill_a_rank(process, program, folders[1])
    finish(process)
    whole = losses(folders[0])
    assert len(whole) == len(dict(whole)) and dict(losses(folders[1])) == dict(whole)


@pytest.mark.full
def test_ranks_that_a_program_spawns_train_as_those_of_torchrun(tmp_path: Path) -> None:
    """And they resume each other's checkpoints: one epoch under torchrun, the next in a program of its own."""
    folders = [tmp_path / name for name in ("torchrun", "both")]
    for folder in folders:
        folder.mkdir()
    finish(started(command("train_ddp", folders[0])))
    line = command("train_ddp", folders[1])
    line[line.index("--epochs") + 1] = "1"
    finish(started(line))
    line = [sys.executable, str(EXAMPLES / "train_spawn.py"), *line[line.index("--epochs"):]]
    line[line.index("--epochs") + 1] = "2"
    finish(started(line))
    assert losses(folders[0]) == losses(folders[1])


def test_what_the_chapter_shows_of_the_programs_is_in_them() -> None:
    cells = nbformat.read(ROOT / "chapters/82_training_with_ddp.ipynb", as_version=4).cells
    (section,) = [cell.source for cell in cells if cell.source.startswith("## The whole program")]
    pieces = re.findall(r"^```python\n(.*?)^```", section, re.DOTALL | re.MULTILINE)
    programs = [path.read_text("utf-8") for path in EXAMPLES.glob("*.py")]
    assert len(pieces) >= 4
    for piece in pieces:
        deeper = [textwrap.indent(piece, " " * depth) for depth in (0, 4, 8)]
        assert any(indented in program for indented in deeper for program in programs), piece


@pytest.mark.full
@pytest.mark.parametrize("forgotten", [
    "model.module.load_state_dict(", "optimizer.load_state_dict(", "set_random_state(kept", "loader.sampler.start ="])
def test_whatever_a_checkpoint_forgets_changes_the_losses(forgotten: str, tmp_path: Path) -> None:
    """The comparison above would notice: without this line the losses of a restarted run differ."""
    lines = (EXAMPLES / "train_ddp.py").read_text("utf-8").splitlines(keepends=True)
    kept = [line for line in lines if not line.strip().startswith(forgotten)]
    assert len(kept) == len(lines) - 1
    program = tmp_path / "train_ddp.py"
    program.write_text("".join(kept), "utf-8")
    line = command("train_ddp", tmp_path)
    line[line.index(str(EXAMPLES / "train_ddp.py"))] = str(program)
    process = started(line)
    kill_a_rank(process, "train_ddp", tmp_path)
    finish(process)
    twice = [place for place, _ in losses(tmp_path)]
    again = {place for place in twice if twice.count(place) == 2}
    assert again and any(len({loss for other, loss in losses(tmp_path) if other == place}) == 2 for place in again)


@pytest.mark.full
def test_a_checkpoint_of_another_world_size_is_refused_in_a_sentence(tmp_path: Path) -> None:
    line = command("train_ddp", tmp_path)
    line[line.index("--epochs") + 1] = "1"
    finish(started(line))
    line[line.index(f"--nproc-per-node={NUM_RANKS}")] = "--nproc-per-node=1"
    line[line.index("--max-restarts=1")] = "--max-restarts=0"
    line[line.index("--epochs") + 1] = "2"
    told, _ = started(line).communicate(timeout=240)
    assert "is of 2 ranks: start as many, or name another --checkpoint" in told
