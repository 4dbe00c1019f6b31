"""Run every notebook through nbval with this machine's GPUs, each in a pytest of its own with a time limit."""
from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.gpu.bounded import Ended, end_all, run_bounded
from benchmarks.process import ROOT
from benchmarks.report import Table

LIMIT_S = 300.0
NOTE = ("Compared with the stored outputs; nbval_sanitize.cfg lets backend and device differ. Launches: the backends "
        "and the numbers of ranks, as the cells print them.")


@dataclass(frozen=True)
class Failure:
    """A failed cell, by its number among the code cells (None: the notebook), and the first lines that say why."""

    cell: int | None
    why: list[str]


@dataclass
class Verdict:
    """How one notebook ended; `launches` has (ranks, backend) in order, for cells that ended."""

    notebook: str
    num_cells: int = 0
    num_passed: int = 0
    seconds: float = 0.0
    launches: list[tuple[int, str]] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)

    @property
    def row(self) -> tuple[str, ...]:
        """Its row in the report's table."""
        sizes = {backend: sorted({num_ranks for num_ranks, other in self.launches if other == backend})
                 for backend in ("nccl", "gloo")}
        told = "; ".join(f"{backend}: {', '.join(map(str, sizes[backend]))}" for backend in sizes if sizes[backend])
        failed = len([failure for failure in self.failures if failure.cell is not None])
        return (f"`{self.notebook}`", str(self.num_cells), str(self.num_passed), str(failed), told or "–",
                f"{self.seconds:.0f} s")


def names() -> list[str]:
    """The book's notebooks; the labs have their solutions."""
    paths = [path for folder in ("chapters", "labs") for path in sorted((ROOT / folder).glob("*.ipynb"))]
    return [str(path.relative_to(ROOT)) for path in paths]


def run_all(notebooks: Sequence[str], num_gpus: int, num_jobs: int, limit_s: float,
            tell: Callable[[Verdict], None]) -> list[Verdict]:
    """Run notebooks, `num_jobs` side by side, and report each as it ends; returns the verdicts in order."""
    def one(notebook: str) -> Verdict:
        verdict = check(notebook, num_gpus, limit_s)
        tell(verdict)
        return verdict

    with ThreadPoolExecutor(num_jobs) as pool:
        try:
            return list(pool.map(one, notebooks))
        except BaseException:  # an interrupt reaches this process alone
            pool.shutdown(wait=False, cancel_futures=True)
            end_all()
            raise


def check(notebook: str, num_gpus: int, limit_s: float = LIMIT_S) -> Verdict:
    """Run one notebook through nbval and compare; whatever happens, this returns soon after `limit_s`."""
    with tempfile.TemporaryDirectory() as folder:
        noted = Path(folder, "cells.jsonl")
        noted.touch()
        ended = run_bounded("pytest", [
            notebook, "--nbval", "--fresh-kernels", "-q", "--color=no", "-p", "no:cacheprovider", "-p", "no:xdist",
            "-p", "benchmarks.gpu.cells", "--cells-into", str(noted)], limit_s)
        notes = [json.loads(line) for line in noted.read_text("utf-8").splitlines() if line.endswith("}")]
    return judged(notebook, notes, ended, num_gpus, limit_s)


def judged(notebook: str, notes: Sequence[dict[str, Any]], ended: Ended, num_gpus: int, limit_s: float) -> Verdict:
    """The verdict that follows from the notes on a notebook's cells and the way its pytest ended."""
    cells = [cell for cell in json.loads((ROOT / notebook).read_text("utf-8"))["cells"] if cell["cell_type"] == "code"]
    verdict = Verdict(notebook, len(cells), seconds=ended.seconds)
    ends = [note for note in notes if note["event"] == "end"]
    for note in ends:
        launches = [(num_ranks, backend) for num_ranks, backend in note["launches"]]
        wrong = [f"{num_ranks} ranks on {backend}, with {num_gpus} GPUs" for num_ranks, backend in launches
                 if (backend == "nccl") != (num_gpus >= num_ranks)]
        verdict.launches += launches
        if note["outcome"] == "failed" or wrong:
            verdict.failures.append(Failure(note["cell"], [*note["why"], *wrong]))
    failed = {failure.cell for failure in verdict.failures}
    verdict.num_passed = len({note["cell"] for note in ends if note["outcome"] == "passed"} - failed)
    verdict.failures += _unfinished(notes, {note["cell"] for note in ends}, ended, limit_s)
    if not verdict.failures and (verdict.num_passed < verdict.num_cells or ended.status):
        verdict.failures.append(Failure(None, [f"only {verdict.num_passed} of {verdict.num_cells} cells passed",
                                               *ended.tail()]))
    return verdict


def _unfinished(notes: Iterable[dict[str, Any]], done: set[int], ended: Ended, limit_s: float) -> list[Failure]:
    """The cell that a notebook was in when it was killed or its pytest died, and processes that could not be killed."""
    found = []
    begun = [note for note in notes if note["event"] == "start" and note["cell"] not in done]
    how = f"ended after {limit_s:g} s, the notebook's limit" if ended.status is None else "pytest ended in this cell"
    for note in begun:
        found.append(Failure(note["cell"], [how, f"it begins: {note['source'].splitlines()[0]}"]))
    if ended.status is None and not begun:
        found.append(Failure(None, [how, *ended.tail()]))
    if ended.num_left:
        found.append(Failure(None, [f"{ended.num_left} of its processes would not end"]))
    return found


def table(verdicts: Sequence[Verdict]) -> Table:
    """One row for each notebook."""
    columns = ("notebook", "cells", "passed", "failed", "launches", "took")
    return Table("Notebooks", columns, [verdict.row for verdict in verdicts], NOTE)
