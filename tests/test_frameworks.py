"""Chapter 14: the names it gives to Accelerate's and Lightning's settings are theirs, and its sums are right.

And torchft, on a page of its own: who is killed takes one attempt of the others at most, and a newcomer heals.
"""
from __future__ import annotations

import inspect
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from typing import Any

import nbformat
import psutil
import pytest

from book.cost import pipeline_bubble
from book.parallel import quorum
from book.parallel.quorum import Attempt
from book.parallel.replicas import Replicas, history, replay
from tests.suite import missing
from tests.website import ROOT

MISSING = "is not installed: python -m pip install -r requirements-frameworks.txt (make test does)"
PAGE = "\n".join(cell.source for cell in nbformat.read(
    ROOT / "chapters" / "14_frameworks.ipynb", as_version=4).cells if cell.cell_type == "markdown")


def column(framework: str) -> dict[str, str]:
    """What the chapter's table says under a framework, by the first cell of the row."""
    rows = [[cell.strip() for cell in line.strip("| ").split(" | ")] for line in PAGE.splitlines() if line[:1] == "|"]
    for number, row in enumerate(rows):
        heads = [cell.split(" {cite}")[0].strip("| ") for cell in row]
        if framework in heads:
            return {body[0]: body[heads.index(framework) + 1] for body in rows[number + 2:number + 16]}
    raise AssertionError(f"no table has a column {framework}")


def pinned() -> dict[str, str]:
    """The frameworks that `make test` installs, with their versions."""
    lines = (ROOT / "requirements-frameworks.txt").read_text("utf-8")
    return dict(re.findall(r"^(\w+)==([\d.]+)(?:;|$)", lines, re.M))


def arguments(*calls: object) -> set[str]:
    """All the arguments that these calls take."""
    return {name for call in calls for name in inspect.signature(call).parameters}


@pytest.mark.slow
@pytest.mark.parametrize("package, called", [("accelerate", "Accelerate"), ("lightning", "Lightning")])
def test_the_chapter_names_the_release_that_is_installed(package: str, called: str) -> None:
    installed = pytest.importorskip(package, reason=f"{package} {MISSING}").__version__
    assert installed == pinned()[package] and f"{called} {installed}" in PAGE


def test_both_tables_have_a_row_for_each_thing() -> None:
    ours, theirs = column("Accelerate"), column("DeepSpeed")
    assert list(ours) == list(theirs) and len(ours) == 14 and "checkpoint" in ours


@pytest.mark.slow
def test_the_names_under_accelerate_are_its_own() -> None:
    accelerate = pytest.importorskip("accelerate", reason=f"accelerate {MISSING}")
    from accelerate.utils import MegatronLMPlugin
    plugins = {kind.__name__: kind for kind in (accelerate.DeepSpeedPlugin, accelerate.FullyShardedDataParallelPlugin,
                                                accelerate.ParallelismConfig, MegatronLMPlugin)}
    loader = {"batch_size", "split_batches"}
    known = arguments(accelerate.Accelerator, *plugins.values()) | loader | plugins.keys()
    said = named("Accelerate")
    assert said - known == {"save_state", "accelerator"} and hasattr(accelerate.Accelerator, "save_state")
    for plugin, argument in re.findall(r"(\w+Plugin)\((\w+)=", " ".join(column("Accelerate").values())):
        assert argument in arguments(plugins[plugin]), f"{plugin} has no {argument}"


@pytest.mark.slow
def test_the_names_under_lightning_are_its_own() -> None:
    lightning = pytest.importorskip("lightning", reason=f"lightning {MISSING}")
    from lightning.pytorch import strategies
    kinds = {name: getattr(strategies, name) for name in ("ModelParallelStrategy", "FSDPStrategy")}
    known = arguments(lightning.Trainer, *kinds.values()) | kinds.keys() | {"batch_size"}
    assert named("Lightning") - known == {"trainer", "save_checkpoint", "path"}
    assert hasattr(lightning.Trainer, "save_checkpoint")
    strings = set(re.findall(r'"(\w+)"', " ".join(column("Lightning").values()))) - {"SHARD_GRAD_OP"}
    assert len(strings) == 4 and strings <= set(strategies.StrategyRegistry.available_strategies())


def named(framework: str) -> set[str]:
    """The names in a column's code, without strings and numbers."""
    quoted = re.findall(r"`([^`]+)`", " ".join(column(framework).values()))
    return {name for code in quoted for name in re.findall(r"[A-Za-z_]\w*", re.sub(r'"[^"]*"', "", code))
            if name not in {"True", "False", "folder"}}


def test_the_sums_in_the_answers() -> None:
    assert 4 * 8 * 16 == 512 == 4 * 32 * 4 and "$4 \\times 8 \\times 16 = 512$" in PAGE
    num_micro_batches = 256 // (2 * (64 // 16))
    assert num_micro_batches == 32 and f"{100 * pipeline_bubble(4, num_micro_batches):.1f} %" in PAGE


def test_make_test_installs_the_frameworks() -> None:
    makefile = Path(ROOT / "Makefile").read_text("utf-8")
    stamp = re.search(r"^test: \$\((\w+)\)$", makefile, re.M)[1]
    assert f"\n$({stamp}): requirements-frameworks.txt " in makefile
    assert set(pinned()) == {"accelerate", "lightning", "torchft"}


@pytest.fixture
def torchft() -> Any:
    """torchft, where the system can have it."""
    return pytest.importorskip("torchft", reason=missing("torchft"))


def committed(told: Iterable[Attempt], among: Iterable[int], num_replicas: int, since_s: float = 0.0) -> int:
    """In how many steps since then each of these replicas, at the least, counted as one of so many."""
    counts = dict.fromkeys(among, 0)
    for one in told:
        if one.committed and one.num_replicas == num_replicas and one.time_s > since_s and one.replica in counts:
            counts[one.replica] += 1
    return min(counts.values())


@pytest.mark.slow
def test_a_killed_replica_takes_one_attempt_at_most_and_a_newcomer_heals(torchft: Any) -> None:
    """Killed at any moment of a step; the whole run is then that of one process with the same batches."""
    assert version("torchft") == pinned()["torchft"]
    with Replicas() as replicas:
        for replica in range(3):
            replicas.start(replica)
        replicas.listen(lambda told: committed(told, range(3), 3) >= 5)
        victim = random.randrange(3)
        survivors = {0, 1, 2} - {victim}
        time.sleep(random.uniform(0, 0.3))
        killed_s = replicas.kill(victim)
        replicas.listen(lambda told: committed(told, survivors, 2, killed_s) >= 3)
        born_s = time.time()
        replicas.start(victim, seed=1)
        replicas.listen(lambda told: committed(told, range(3), 3, born_s) >= 3)
        living = [one for one in replicas.told if one.replica in survivors or one.time_s > born_s]
    for replica in survivors:
        assert sum(one.replica == replica and one.time_s > killed_s and not one.committed for one in living) <= 1
    steps = history(living)
    assert [one.step for one in steps] == [*range(len(steps))]
    assert all(after.cursor == one.cursor + one.num_replicas for one, after in pairwise(steps))
    digests = [{one.digest for one in living if one.committed and one.step == step} for step in range(len(steps))]
    assert all(len(of_step) == 1 for of_step in digests) and len(set.union(*digests)) == len(steps)
    newcomer = next(one for one in living if one.replica == victim)
    assert newcomer.step >= 8 and newcomer.place is None
    alone = replay(one.num_replicas for one in steps)
    errors = [abs(one.loss - alone[one.step][one.place]) for one in living if one.committed and one.place is not None]
    assert len(errors) >= 2 * len(steps) - 3 and max(errors) < 1e-12


def dies_in_the_all_reduce(replica: int, lighthouse: str, tell: Callable[[Any], None]) -> None:
    """`train`, in which replica 1 dies in a step of all three, when the others may be in their all-reduce already."""
    average = quorum.average

    def dies(manager: Any, module: Any) -> None:
        if replica == 1 and manager.num_participants() == 3 and manager.current_step() >= 4:
            os.kill(os.getpid(), signal.SIGKILL)
        average(manager, module)

    quorum.average = dies
    quorum.train(replica, lighthouse, tell)


@pytest.mark.slow
def test_who_dies_in_the_all_reduce_takes_just_that_attempt(torchft: Any) -> None:
    with Replicas() as replicas:
        for replica in range(3):
            replicas.start(replica, dies_in_the_all_reduce)
        replicas.listen(lambda told: any(not one.committed for one in told) and committed(
            told, {0, 2}, 2, max(one.time_s for one in told if not one.committed)) >= 3)
        ends = replicas.exit_codes()
    assert ends == {0: None, 1: -signal.SIGKILL, 2: None}
    told = [one for one in replicas.told if one.replica != 1]
    (mine,), (other,) = [[one for one in told if one.replica == replica and not one.committed] for replica in (0, 2)]
    assert (mine.step, mine.num_replicas, mine.digest) == (other.step, other.num_replicas, other.digest)
    again = [one for one in told if one.step == mine.step and one.committed]
    assert {(one.num_replicas, one.cursor) for one in again} == {(2, mine.cursor)}


@pytest.mark.slow
def test_replicas_end_with_the_process_that_has_started_them_however_that_ends(torchft: Any) -> None:
    program = ("import time\nfrom book.parallel.replicas import Replicas\nwith Replicas() as replicas:\n"
               "    replicas.start(0, lambda *given: time.sleep(600))\n"
               "    print(*[process.pid for process in replicas.processes], flush=True)\n    time.sleep(600)")
    starter = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    try:
        started = [psutil.Process(int(pid)) for pid in starter.stdout.readline().split()]
        assert len(started) == 2 and all(one.is_running() for one in started)
    finally:
        starter.kill()
        starter.communicate()
    assert not psutil.wait_procs(started, timeout=30)[1]


def test_replicas_without_torchft_say_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchft", None)
    monkeypatch.setattr("book.parallel.replicas.find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match="need torchft: python -m pip install -r requirements-frameworks.txt"):
        Replicas().__enter__()
