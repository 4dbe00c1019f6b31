"""The programs in examples/: killed in the middle and started again, under torchrun, their losses stay the same.

What does not need a torchrun of its own runs on ranks of `launch`, which import nothing.
"""
from __future__ import annotations

import importlib.util
import os
import re
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import nbformat
import psutil
import pytest
import torch

from book.launch import launch
from tests.website import ROOT

EXAMPLES = ROOT / "examples"
NUM_RANKS, SAVE_EVERY = 2, 4
DDP, FSDP = EXAMPLES / "train_ddp.py", EXAMPLES / "train_fsdp.py"
EPOCHS = {"train_ddp": 2, "train_fsdp": 1}


def arguments(folder: Path, epochs: int, workers: int = 0, precision: str = "float64") -> list[str]:
    return ["--epochs", str(epochs), "--workers", str(workers), "--precision", precision, "--text", str(DDP),
            "--save-every", str(SAVE_EVERY), "--checkpoint", str(folder / "checkpoint"), "--losses",
            str(folder / "losses")]


def command(program: str, folder: Path) -> list[str]:
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={NUM_RANKS}",
            "--max-restarts=1", str(EXAMPLES / f"{program}.py"), *arguments(folder, EPOCHS[program], workers=1)]


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


def run_killed(program: str, folder: Path) -> Path:
    """Run a program under torchrun until it ends, with a rank killed on the way; returns the folder."""
    folder.mkdir()
    process = started(command(program, folder))
    kill_a_rank(process, program, folder)
    finish(process)
    return folder


def trained(program: str, given: list[str]) -> str:
    """In a rank: what this program says when it ends itself. Each checkpoint is kept, under its step."""
    module = loaded(program)
    save = module.save

    def save_and_keep(path, model, optimizer, place):
        save(path, model, optimizer, place)
        if int(os.environ["RANK"]) == 0:
            shutil.copy(path, f"{path}.{place['step']}")

    module.save = save_and_keep
    return said(module, [program, *given])


def loaded(program: str) -> ModuleType:
    """The program as a module; it finds the other programs beside it."""
    sys.path.insert(0, str(EXAMPLES))
    spec = importlib.util.spec_from_file_location("program", program)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def said(module: ModuleType, command_line: list[str]) -> str:
    """What this program says when it ends itself; "" if it comes to its end."""
    sys.argv = command_line
    try:
        module.main()
    except SystemExit as ended:
        return str(ended)
    return ""


def without_dropout(program: str, given: list[str]) -> str:
    """In a rank: what this program says, whose dropout zeroes nothing."""
    module = loaded(program)
    layer = torch.nn.TransformerEncoderLayer
    torch.nn.TransformerEncoderLayer = lambda *sizes, **how: layer(*sizes, **how | {"dropout": 0.0})
    return said(module, [program, *given])


@pytest.fixture(scope="module")
def one_epoch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of an undisturbed epoch of train_ddp, with all its checkpoints."""
    folder = tmp_path_factory.mktemp("epoch")
    assert list(launch(trained, NUM_RANKS, str(DDP), arguments(folder, 1), timeout_s=120)) == [""] * NUM_RANKS
    return folder


@pytest.fixture(scope="module")
def killed_ddp(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of train_ddp under torchrun that lost a rank."""
    return run_killed("train_ddp", tmp_path_factory.mktemp("killed") / "run")


@pytest.mark.slow
@pytest.mark.parametrize("program", EPOCHS)
def test_a_rank_killed_in_the_middle_changes_no_loss(program: str, request: pytest.FixtureRequest,
                                                     tmp_path: Path) -> None:
    """torchrun ends the other rank and starts both anew; they redo the steps since the checkpoint, bit for bit."""
    ddp = program == "train_ddp"
    folder = request.getfixturevalue("killed_ddp") if ddp else run_killed(program, tmp_path / "run")
    killed = losses(folder)
    assert len(set(killed)) == len(dict(killed)), "a step has one loss"
    steps = [[step for epoch, step in dict(killed) if epoch == which] for which in range(EPOCHS[program])]
    assert all(epoch == [*range(len(steps[0]))] for epoch in steps), "no step is left out"
    again = [place for number, (place, _) in enumerate(killed) if place in dict(killed[:number])]
    assert len(again) >= 2, "two steps or more are repeated: the second shows the momenta as well"
    assert len(again) <= len(dict(killed)) - 2 * SAVE_EVERY, "those before a checkpoint are not"
    assert not psutil.wait_procs(processes_of(folder), timeout=10)[1], "nothing is left behind"


@pytest.mark.slow
def test_a_run_with_a_killed_rank_ends_as_one_without_whoever_starts_its_ranks(
        one_epoch: Path, killed_ddp: Path, tmp_path: Path) -> None:
    """One epoch on ranks of `launch`, the next on ranks that a program spawns: they resume each other's checkpoints."""
    for name in ("checkpoint", "losses"):
        shutil.copy(one_epoch / name, tmp_path)
    finish(started([sys.executable, str(EXAMPLES / "train_spawn.py"), *arguments(tmp_path, 2)]))
    whole = losses(tmp_path)
    assert len(whole) == len(dict(whole)) and dict(losses(killed_ddp)) == dict(whole)


def resumed(one_epoch: Path, folder: Path, program: Path, num_ranks: int = NUM_RANKS) -> list[str]:
    """What ranks say that go on from the second checkpoint of the undisturbed epoch, to its end."""
    shutil.copy(one_epoch / f"checkpoint.{2 * SAVE_EVERY}", folder / "checkpoint")
    return list(launch(trained, num_ranks, str(program), arguments(folder, 1), timeout_s=120))


@pytest.mark.slow
@pytest.mark.parametrize("forgotten", [
    None, "model.module.load_state_dict(", "optimizer.load_state_dict(", "set_random_state(kept",
    "loader.sampler.start ="])
def test_whatever_a_checkpoint_forgets_changes_the_losses(forgotten: str | None, one_epoch: Path,
                                                          tmp_path: Path) -> None:
    """The comparisons above would notice: without this line the losses of a restarted run differ."""
    lines = DDP.read_text("utf-8").splitlines(keepends=True)
    kept = [line for line in lines if forgotten is None or not line.strip().startswith(forgotten)]
    assert len(kept) == len(lines) - (forgotten is not None)
    program = tmp_path / "train_ddp.py"
    program.write_text("".join(kept), "utf-8")
    assert resumed(one_epoch, tmp_path, program) == [""] * NUM_RANKS
    again, whole = losses(tmp_path), losses(one_epoch)
    assert [place for place, _ in again] == [place for place, _ in whole][2 * SAVE_EVERY:]
    assert (again == whole[2 * SAVE_EVERY:]) == (forgotten is None)


@pytest.mark.slow
def test_a_checkpoint_of_another_world_size_is_refused_in_a_sentence(one_epoch: Path, tmp_path: Path) -> None:
    (told,) = resumed(one_epoch, tmp_path, DDP, num_ranks=1)
    assert "is of 2 ranks: start as many, or name another --checkpoint" in told


@pytest.fixture(scope="module")
def fsdp_in_bf16(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of an epoch of train_fsdp in bf16, without dropout."""
    return in_bf16(FSDP, tmp_path_factory.mktemp("fsdp"))


def in_bf16(program: Path, folder: Path) -> Path:
    ranks = launch(without_dropout, NUM_RANKS, str(program), arguments(folder, 1, precision="bf16"), timeout_s=120)
    assert list(ranks) == [""] * NUM_RANKS
    return folder


@pytest.mark.slow
def test_the_losses_of_both_programs_agree_in_bf16(fsdp_in_bf16: Path, tmp_path: Path) -> None:
    """Their rounding differs by less than that of a loss in bf16, whose last digit is worth 0.016 here."""
    ddp, fsdp = ([float(loss) for _, loss in losses(folder)] for folder in (in_bf16(DDP, tmp_path), fsdp_in_bf16))
    assert len(ddp) == len(fsdp) == len(set(fsdp)) and max(abs(a - b) for a, b in zip(ddp, fsdp)) < 0.005


@pytest.mark.slow
def test_train_fsdp_too_refuses_a_checkpoint_of_another_world_size(fsdp_in_bf16: Path) -> None:
    given = arguments(fsdp_in_bf16, 2, precision="bf16")
    (told,) = launch(without_dropout, 1, str(FSDP), given, timeout_s=120)
    assert "is of 2 ranks: start as many, or name another --checkpoint" in told


def test_what_the_chapter_shows_of_the_programs_is_in_them() -> None:
    cells = nbformat.read(ROOT / "chapters/82_training_with_ddp.ipynb", as_version=4).cells
    (section,) = [cell.source for cell in cells if cell.source.startswith("## The whole program")]
    pieces = re.findall(r"^```python\n(.*?)^```", section, re.DOTALL | re.MULTILINE)
    programs = [path.read_text("utf-8") for path in EXAMPLES.glob("*.py")]
    assert len(pieces) >= 4
    for piece in pieces:
        deeper = [textwrap.indent(piece, " " * depth) for depth in (0, 4, 8)]
        assert any(indented in program for indented in deeper for program in programs), piece
