"""A small lab to attack, the submissions that attack it, and a grading run with an honest victim beside them.

A file in tests/attacks/ is headed `# exercise: 1` and `# ends: words of the status`; after an empty line comes what the
attacker wrote into that exercise's answer cell. The other answers are right.
"""
from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import nbformat
import psutil
from nbformat import NotebookNode
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

from book.grading import sandbox
from book.grading.lab import code_cells, marks

SETUP = "import random\n\nfrom book import checks"
BOUNDS = '''def chunk_bounds(length, num_chunks):
    """The (start, stop) of each chunk, the first ones longer by one."""
    ### BEGIN SOLUTION
    size, longer = divmod(length, num_chunks)
    starts = [chunk * size + min(chunk, longer) for chunk in range(num_chunks + 1)]
    return list(zip(starts, starts[1:]))
    ### END SOLUTION
'''
CHECK_1 = '''draw = random.Random(SEED)
length, num_chunks = draw.randrange(100, 1000), draw.randrange(2, 9)
bounds = chunk_bounds(length, num_chunks)
assert bounds[0][0] == 0 and bounds[-1][1] == length, "the chunks must cover everything"
checks.number("the last chunk's length", bounds[-1][1] - bounds[-1][0], length // num_chunks)
print("bounds:", bounds)'''
HIDDEN_1 = '''draw = random.Random(SEED + 1)
for _ in range(3):
    length, num_chunks = draw.randrange(1000), draw.randrange(1, 9)
    print("hidden 1:", sum((i + 1) * stop for i, (_, stop) in enumerate(chunk_bounds(length, num_chunks))))'''
TOTAL = '''def ring_sent(num_bytes, world_size):
    """Bytes that each rank of a ring all-reduce sends."""
    ### BEGIN SOLUTION
    return 2 * (world_size - 1) * num_bytes // world_size
    ### END SOLUTION
'''
CHECK_2 = '''num_bytes = 24 * random.Random(SEED + 2).randrange(1, 10**6)
sent = checks.number("what is sent", ring_sent(num_bytes, 4), 2 * 3 * num_bytes / 4)
print(f"sent: {sent:.0f} {ring_sent(num_bytes, 3):.0f}")'''


def attack_lab() -> NotebookNode:
    """Two exercises without torch: quick to grade. 2 + 1 points."""
    cells = [
        new_markdown_cell("# A lab to attack"), _cell(SETUP, id="setup", kind="setup"),
        _cell("SEED = 3", id="seed", kind="parameters"),
        _cell(BOUNDS, id="bounds", kind="answer", exercise=1),
        _cell(CHECK_1, id="check-1", kind="check", exercise=1, points=2),
        _cell(HIDDEN_1, id="hidden-1", kind="check", exercise=1, points=0, hidden=True),
        _cell(TOTAL, id="sent", kind="answer", exercise=2),
        _cell(CHECK_2, id="check-2", kind="check", exercise=2, points=1)]
    lab = new_notebook(cells=cells, metadata={"lockstep": {"points": 3}})
    for number, cell in enumerate(lab.cells):
        cell.id = f"cell-{number}"
    return lab


def _cell(source: str, **mark: Any) -> NotebookNode:
    cell = new_code_cell(source.rstrip("\n"))
    cell.metadata["lockstep"] = mark
    return cell


def answered(lab: NotebookNode, **answers: str) -> NotebookNode:
    """A copy of a lab as it is handed in, with other sources in the answer cells whose ids are named."""
    copy = nbformat.from_dict(json.loads(nbformat.writes(lab)))
    copy.cells = [cell for cell in copy.cells if not marks(cell).get("hidden")]
    for cell in code_cells(copy):
        if marks(cell)["id"].replace("-", "_") in answers:
            cell.source = answers[marks(cell)["id"].replace("-", "_")]
    return copy


@dataclass
class Course:
    """A lab, a folder of submissions, a folder for the results, and the user who grades."""
    folder: Path
    lab: NotebookNode
    as_nobody: bool = False

    def __post_init__(self) -> None:
        for name in ("submissions", "results"):
            (self.folder / name).mkdir(exist_ok=True)
        nbformat.write(self.lab, self.folder / "lab.ipynb")

    def hand_in(self, name: str, notebook: NotebookNode) -> Path:
        """Puts a notebook among the submissions."""
        path = self.folder / "submissions" / f"{name}.ipynb"
        nbformat.write(notebook, path)
        return path

    def command(self, *options: str) -> list[str]:
        """The command that grades, as this user or as nobody."""
        grade = [sys.executable, "-m", "book.grading", "grade", str(self.folder / "lab.ipynb"),
                 str(self.folder / "submissions"), "-o", str(self.folder / "results"), *options]
        if not self.as_nobody:
            return grade
        for path in [self.folder, *self.folder.rglob("*")]:
            os.chown(path, 65534, 65534, follow_symlinks=False)
        drop = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "--"]
        seen = sandbox.reachable([*sandbox.pythons(), sandbox.BOOK, self.folder], bind="--bind")
        return ["bwrap", "--dev-bind", "/", "/", *seen, "--die-with-parent", "--", *drop, *grade]

    def grade(self, *options: str, timeout_s: float = 300) -> subprocess.CompletedProcess:
        """Grades, from a folder of its own, and returns what was printed."""
        env = {**os.environ, "PYTHONPATH": str(sandbox.BOOK.parent), "TMPDIR": str(self.temporary())}
        return subprocess.run(self.command("-j", "2", *options), capture_output=True, text=True, timeout=timeout_s,
                              cwd="/", env=env)

    def temporary(self) -> Path:
        """The folder in which the run makes its temporary ones: what is left there was left behind."""
        folder = Path("/tmp") / f"lt-{self.folder.parent.name}-{self.folder.name}"
        folder.mkdir(exist_ok=True)
        folder.chmod(0o777)
        return folder

    def record(self, name: str) -> dict[str, Any]:
        """A student's record."""
        return json.loads((self.folder / "results" / "students" / f"{name}.json").read_text())

    def left_behind(self) -> tuple[list[Path], list[str]]:
        """Temporary folders and processes of the run that are still there."""
        processes = []
        for process in psutil.process_iter(["cmdline"]):
            line = " ".join(process.info["cmdline"] or [])
            if str(self.temporary()) in line or str(self.folder) in line:
                processes.append(line)
        return list(self.temporary().iterdir()), processes
