"""Every lab: solutions score full marks in the sandbox, an untouched copy none, and variants need their own."""
from __future__ import annotations

import json
import os
import re
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

import nbformat
import pytest

from book.checks.verdict import CheckFailed
from book.grading import sandbox
from book.grading.grade import grade
from book.grading.handed_in import find
from book.grading.lab import code_cells, marks, needed, points, read_lab, with_seed
from book.grading.lint import SEEDS
from book.grading.release import in_variant, released
from book.grading.trial import printed, solution
from book.launch import LaunchError


pytestmark = pytest.mark.slow
LABS = sorted((Path(__file__).resolve().parents[1] / "labs").glob("*.ipynb"))
SEED = 5
# What is graded of each lab, with what it needs: an exercise that runs ranks where a cheap one does. The first lab is
# graded whole, and with LOCKSTEP_WHOLE=1 each is. The right answers in tests/answers run the other checks.
GRADED = {"02_data_parallel": 2, "03_ring_all_reduce": 6, "04_sharded_data_parallel": 7, "05_tensor_parallel": 2,
          "06_pipeline_parallel": 2, "07_hybrid_3d": 2, "08_context_parallel": 5, "09_experts": 2,
          "10_planner": 3, "11_beyond_one_machine": 4, "12_when_a_rank_dies": 2, "13_slow_jobs": 6, "14_frameworks": 3,
          "15_parameter_server": 4}
WHOLE = "LOCKSTEP_WHOLE" in os.environ


class LabGraded:
    """The tests of one lab. Each lab has a class, so that labs can be tested side by side."""
    path: Path

    def test_the_solutions_score_full_marks_and_the_released_copy_none(self, tmp_path, monkeypatch):
        """The secret seed is one that a check using only part of it can't tell from the lab's own."""
        lab, handed_in = read_lab(self.path), tmp_path / "submissions"
        whole = WHOLE or self.path.stem not in GRADED
        solved = set(points(lab)) if whole else needed(lab, GRADED[self.path.stem])
        lab = part_of(lab, solved)
        nbformat.write(lab, tmp_path / self.path.name)
        monkeypatch.setattr("book.grading.grade.secrets.randbelow", lambda end: own_seed(lab) + SEEDS[1] - SEEDS[0] - 1)
        handed_in.mkdir()
        nbformat.write(solutions(lab), handed_in / "solutions.ipynb")
        nbformat.write(released(lab), handed_in / "untouched.ipynb")
        mine, untouched = grade(tmp_path / self.path.name, find(handed_in, self.path.name), tmp_path / "out")
        told = {number: (e["status"], e.get("log", "")[:1500]) for number, e in mine["exercises"].items()}
        assert {int(n): e["points"] for n, e in mine["exercises"].items()} == points(lab), told
        assert set(points(lab)) == solved
        assert untouched["points"] == 0 and not untouched["error"]
        assert untouched["max_points"] == sum(points(lab).values()) == lab.metadata["lockstep"]["points"]
        references = json.loads((tmp_path / "out" / "references.json").read_text())
        for cell in code_cells(lab):
            if marks(cell)["kind"] == "check":  # with the secret seed they print something else than with the lab's
                outputs = references[str(marks(cell)["exercise"])]["outputs"][marks(cell)["id"]]
                assert text(outputs) and text(outputs) != text(cell.outputs), marks(cell)["id"]

    def test_a_published_solution_fails_the_variant(self):
        """If a variant has its own answer, that one passes, and the published one fails in the public check.

        Runs in this process, as test_answers does: the test above tries how a job is started and confined.
        """
        lab, variant = read_lab(self.path), seeded(in_variant(read_lab(self.path), "B"))
        changed = {exercise for exercise in points(lab) if solution(lab, exercise) != solution(variant, exercise)}
        assert changed
        for exercise in changed:
            printed(variant, exercise, solution(variant, exercise), "variant")  # raises when it fails
            passed = {}
            with pytest.raises((CheckFailed, LaunchError)):
                printed(variant, exercise, solution(lab, exercise), "published", passed)
            assert not passed, "the first check finds it"


def seeded(lab: nbformat.NotebookNode) -> nbformat.NotebookNode:
    """The lab with another seed."""
    for cell in code_cells(lab):
        if marks(cell)["kind"] == "parameters":
            cell.source = with_seed(cell.source, SEED)
    return lab


def own_seed(lab: nbformat.NotebookNode) -> int:
    return next(int(cell.source.splitlines()[0].split("=")[1]) for cell in code_cells(lab)
                if marks(cell)["kind"] == "parameters")


def part_of(lab: nbformat.NotebookNode, exercises: set[int]) -> nbformat.NotebookNode:
    """The lab with these exercises alone. Each reference takes seconds, and a submission may answer any of them."""
    lab.cells = [cell for cell in lab.cells if marks(cell).get("exercise") in {None, *exercises}]
    lab.metadata["lockstep"]["points"] = sum(points(lab).values())
    return lab


def solutions(lab: nbformat.NotebookNode) -> nbformat.NotebookNode:
    """The submission of a student who solved the exercises as the lab does."""
    copy = released(lab)
    own = {marks(cell)["id"]: cell.source for cell in code_cells(lab)}
    for cell in code_cells(copy):
        if marks(cell)["kind"] == "answer":
            cell.source = own[marks(cell)["id"]]
    return copy


def text(outputs: list[dict]) -> str:
    """What was printed, without the line that says what the ranks run on."""
    told = "".join(out["text"] for out in outputs if out.get("name") == "stdout")
    return "".join(line for line in told.splitlines(keepends=True) if not re.match(r"\d+ ranks? on ", line))


for _path in LABS:
    globals()[f"TestLab{_path.stem}"] = type(f"TestLab{_path.stem}", (LabGraded,), {"path": _path})


LOOK = """
import json, os, resource
print(json.dumps({"size": {path: os.statvfs(path).f_blocks * os.statvfs(path).f_frsize for path in PLACES},
                  "limits": [resource.getrlimit(which)[0] for which in WHICH]}))
"""
PLACES = ["/dev/shm", "/tmp", "/home"]
WHICH = [resource.RLIMIT_NPROC, resource.RLIMIT_FSIZE, resource.RLIMIT_CPU, resource.RLIMIT_DATA, resource.RLIMIT_CORE]


@pytest.mark.slow
def test_writes_and_resources_are_limited() -> None:
    code = LOOK.replace("PLACES", repr(PLACES)).replace("WHICH", repr(WHICH))
    limits = sandbox.Limits(cpu_s=7, memory_bytes=1 << 30, num_processes=33, scratch_bytes=1 << 20)
    with tempfile.TemporaryDirectory() as folder:  # not pytest's own, which nobody else may enter
        sandbox.folder_for(Path(folder))
        command = sandbox.command([sys.executable, "-c", code], Path(folder), limits)
        run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout)
    assert found["size"] == dict.fromkeys(PLACES, 1 << 20)
    assert found["limits"] == [33, 1 << 20, 7, 1 << 30, 0]
