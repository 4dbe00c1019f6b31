"""Ranks of lab 11's training killed at drawn moments, saves included: what is lost, and what is left.

    python -m tests.kills [TIMES] [SEED]     so many kills (20); prints a line for each, and a table

A training is killed up to three times, each time on another number of ranks, then runs to its end. Exits with 1 if a
checkpoint is lost, a resumed run has another loss than the undisturbed one, or a process is left.
"""
from __future__ import annotations

import contextlib
import io
import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import nbformat

from book.grading.lab import code_cells, marks, shown
from book.launch import RankError, launch

LAB = Path(__file__).parents[1] / "labs" / "11_when_a_rank_dies.ipynb"
NUM_STEPS, EVERY, STEP_S = 18, 3, 0.02
EXACT = 1e-12


class Kill(NamedTuple):
    """One kill: on how many ranks, which of them, after how long; the step it came in and the checkpoint left."""

    num_ranks: int
    victim: int
    after_s: float
    step: int
    checkpoint: int
    while_saving: bool
    problem: str


def lab() -> dict[str, Any]:
    """What the setup and answer cells of the lab define."""
    namespace: dict[str, Any] = {"__name__": "__main__"}
    for cell in code_cells(nbformat.read(LAB, as_version=4)):
        if marks(cell)["kind"] in ("setup", "parameters", "answer") and not shown(cell):
            exec(compile(cell.source, f"<ipython-input-{marks(cell)['id']}>", "exec"), namespace)
    return namespace


def job(train: Any, folder: str, victim: int, after_s: float) -> dict[int, float]:
    """Train; `victim` dies `after_s` after its first step has begun. Leaves its process id and rank 0's steps."""
    rank = int(os.environ["RANK"])
    Path(folder, f"pid{rank}").write_text(str(os.getpid()))

    def before_step(step: int) -> None:
        if rank == victim and not hasattr(before_step, "armed"):
            before_step.armed = True  # type: ignore[attr-defined]
            threading.Timer(after_s, os.kill, (os.getpid(), signal.SIGKILL)).start()
        if rank == 0:
            Path(folder, "begun").write_text(str(step))
        time.sleep(STEP_S)

    return train(folder, NUM_STEPS, EVERY, before_step)


def launched(train: Any, folder: str, num_ranks: int, victim: int = -1, after_s: float = 0) -> dict[int, float] | None:
    """The losses by step; None if the victim was killed."""
    with contextlib.redirect_stdout(io.StringIO()):
        try:
            return launch(job, num_ranks, train, folder, victim, after_s)[0]
        except RankError as error:
            if f"rank {victim} was killed by SIGKILL" in str(error):
                return None
            raise


def left(folder: str) -> list[int]:
    """The ranks' processes that are still there."""
    pids = [int(path.read_text()) for path in Path(folder).glob("pid*")]
    return [pid for pid in pids if Path(f"/proc/{pid}").exists()]


def kills(times: int, seed: int) -> Iterator[Kill]:
    """So many kills, each with what went wrong in it ("" if nothing did)."""
    names, draws, done = lab(), random.Random(seed), 0
    train, latest = names["train"], names["latest"]
    with tempfile.TemporaryDirectory() as folder:
        want = launched(train, folder, 4)
    while done < times:
        with tempfile.TemporaryDirectory() as folder:
            losses = None
            for _ in range(3):
                num_ranks = draws.randint(2, 4)
                victim, after_s = draws.randrange(num_ranks), draws.uniform(0.2, 3)
                before = latest(folder) or 0
                losses = launched(train, folder, num_ranks, victim, after_s)
                if losses is not None:
                    break  # it was done before the kill came
                done += 1
                begun = int(Path(folder, "begun").read_text())
                half = any(not (path / ".metadata").exists() for path in Path(folder).glob("step*"))
                now = latest(folder) or 0
                problem = "a checkpoint is lost" if now < max(before, begun // EVERY * EVERY) else ""
                yield Kill(num_ranks, victim, after_s, begun, now, half,
                           problem or ("a process is left" if left(folder) else ""))
            begins = latest(folder) or 0
            losses = losses or launched(train, folder, draws.randint(1, 4))
            wrong = [step for step in losses if abs(losses[step] - want[step]) > EXACT]
            if wrong or max(losses) != NUM_STEPS - 1 or (min(losses) != begins and begins < NUM_STEPS):
                yield Kill(0, 0, 0, min(losses), begins, False, f"a wrong resume: steps {wrong}")


def main() -> int:
    """Print all kills and what they came to; 1 if anything went wrong."""
    times = int(sys.argv[1]) if len(sys.argv) > 1 else 20
    seed = int(sys.argv[2]) if len(sys.argv) > 2 else 1
    found = []
    for kill in kills(times, seed):
        found.append(kill)
        print(f"{kill.num_ranks} ranks, rank {kill.victim} after {kill.after_s:.2f} s, in step {kill.step}"
              f"{', in a save' * kill.while_saving}: checkpoint {kill.checkpoint}. {kill.problem}", flush=True)
    print(f"{len(found)} kills with seed {seed}: {sum(kill.while_saving for kill in found)} in a save, by ranks "
          f"{dict(sorted(Counter(kill.num_ranks for kill in found).items()))}, "
          f"problems {sum(bool(kill.problem) for kill in found)}")
    return int(any(kill.problem for kill in found))


if __name__ == "__main__":
    sys.exit(main())
