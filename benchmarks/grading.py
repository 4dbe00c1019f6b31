"""Grading: what the sandbox costs over bare nbval on a lab of 4 ranks, and how many submissions an hour are graded."""
from __future__ import annotations

import os
import statistics
import tempfile
import time
from pathlib import Path

import nbformat

from benchmarks.process import ROOT
from benchmarks.report import Claim, Findings, Table, Unavailable, duration, ratio
from book.grading import sandbox
from book.grading.grade import grade
from book.grading.handed_in import find
from book.grading.lab import code_cells, job, marks, points, read_lab
from book.grading.run import run

QUICK = {"num_rounds": 1, "num_submissions": 2}
LAB, EXERCISE = ROOT / "labs" / "03_ring_all_reduce.ipynb", 3
PROMISED_OVERHEAD = 1.5
PROMISED_AN_HOUR = 120
NOTE = ("The job is exercise 3 of the ring lab with its checks, up to 5 ranks: the start of nbval and its kernel, "
        "importing torch, and the runs. Ratios of the same round: median (smallest–largest). Every second "
        "submission has a mistake in exercise 3. In exercises 1, 2, 3 and 6 the ranks run once more, each in a sandbox "
        "of its own.")


def measure(num_rounds: int = 5, num_submissions: int = 20) -> Findings:
    """Run one exercise without and with the sandbox, one after the other in each round; then grade submissions."""
    try:
        sandbox.probe()
    except sandbox.SandboxError as error:
        raise Unavailable(str(error)) from None
    lab, found = read_lab(LAB), Findings()
    rounds = [[time_job(job(lab, EXERCISE, 11), sandboxed) for sandboxed in (False, True)] for _ in range(num_rounds)]
    ratios = [inside / bare for bare, inside in rounds]
    found.claims.append(Claim(f"the sandbox takes at most {PROMISED_OVERHEAD} times as long as bare nbval on a lab of "
                              "4 ranks", f"{ratio(ratios)} times", statistics.median(ratios) <= PROMISED_OVERHEAD))
    bare, inside = (statistics.median(times) for times in zip(*rounds))
    num_jobs = os.cpu_count() or 1
    seconds = time_grading(lab, num_submissions, num_jobs)
    an_hour = num_submissions / seconds * 3600
    found.claims.append(Claim(f"at least {PROMISED_AN_HOUR} submissions of the ring lab are graded in an hour, "
                              f"{num_jobs} side by side", f"{an_hour:.0f}", an_hour >= PROMISED_AN_HOUR))
    rows = [("one exercise, bare nbval", duration(bare)), ("one exercise, in the sandbox", duration(inside)),
            (f"{num_submissions} submissions of the lab, {num_jobs} side by side", duration(seconds)),
            ("submissions an hour", f"{an_hour:.0f}")]
    found.tables.append(Table("Grading", ("what", "time"), rows, NOTE))
    return found


def time_job(notebook: nbformat.NotebookNode, sandboxed: bool) -> float:
    """Seconds for one job; all its checks must pass."""
    result = run(notebook, sandboxed=sandboxed)
    failed = [cell["id"] for cell in result.cells if not cell["ok"]]
    assert not result.why and result.cells and not failed, (result.why, failed)
    return result.wall_s


def time_grading(lab: nbformat.NotebookNode, num_submissions: int, num_jobs: int) -> float:
    """Seconds to grade submissions; every second one has a mistake in one exercise."""
    total = sum(points(lab).values())
    with tempfile.TemporaryDirectory() as folder:
        handed_in = Path(folder, "submissions")
        handed_in.mkdir()
        for number in range(num_submissions):
            for cell in code_cells(lab):
                if marks(cell)["kind"] == "answer":
                    cell.source += f"\n# student {number}"
                    if marks(cell)["exercise"] == EXERCISE and number % 2:
                        cell.source = "def ring_all_reduce(buffer):\n    pass"
            nbformat.write(lab, handed_in / f"student{number:02}.ipynb")
            lab = read_lab(LAB)
        start_s = time.perf_counter()
        records = grade(LAB, find(handed_in, LAB.name), Path(folder, "out"), num_jobs)
        seconds = time.perf_counter() - start_s
    assert [record["points"] == total for record in records] == [number % 2 == 0 for number in range(num_submissions)]
    return seconds
