"""A small lab to attack, the submissions that attack it, and a grading run with an honest victim beside them.

A file in tests/attacks/ is headed `# exercise: 1` and `# ends: words of the status`; after an empty line comes what the
attacker wrote into that exercise's answer cell. The other answers are right. An attack that succeeds gives the
right answer, so its points show it. `# needs: warm processes` heads those that only the walls of a forked sandbox
stop: where none can be made, they are skipped. `# right if: found` has a function follow whose answer is right if that
holds, and wrong otherwise. In its code @FOLDER@, @HOST@ and @PORT@ stand for the course's folder
and a server, @RING@ for a right ring.
"""
from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import weakref
from collections.abc import Iterable
from contextlib import closing
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import nbformat
import psutil
import pytest
from nbformat import NotebookNode
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

from book.grading import sandbox
from book.grading.lab import code_cells, marks, points
from book.grading.reference import ALLOWANCE_S
from book.grading.warm import Warm
from tests.once import once

ATTACKS = Path(__file__).parent / "attacks"
USERS = ["self", "nobody"] if os.geteuid() == 0 else ["self"]
BLOWN = "this is no sandbox: nothing is tried"
# Attacks that could hurt the machine do not start outside a sandbox; the tests look for these words.
FUSE = f'''import socket
if socket.gethostname() != "lab" or open("/proc/1/comm").read() not in ("bwrap\\n", "sandbox\\n"):
    raise SystemExit("{BLOWN}")

'''
SETUP = "import random\n\nfrom book.checks import formula"
BOUNDS = '''def chunk_bounds(length, num_chunks):
    """The (start, stop) of each chunk; the first ones are longer by one."""
    ### BEGIN SOLUTION
    size, longer = divmod(length, num_chunks)
    starts = [chunk * size + min(chunk, longer) for chunk in range(num_chunks + 1)]
    return list(zip(starts, starts[1:]))
    ### END SOLUTION
'''
RIGHT_IF = '''

def chunk_bounds(length, num_chunks):
    size, longer = divmod(length, num_chunks)
    starts = [chunk * size + min(chunk, longer if {holds} else 0) for chunk in range(num_chunks + 1)]
    return list(zip(starts, starts[1:]))
'''
# No length is a multiple of the number of chunks. An attack that found nothing answers with equal chunks, and those
# have to be wrong whatever the seed.
CHECK_1 = '''draw = random.Random(SEED)
num_chunks = draw.randrange(2, 9)
length = num_chunks * draw.randrange(10, 100) + draw.randrange(1, num_chunks)
bounds = chunk_bounds(length, num_chunks)
assert bounds[0][0] == 0 and bounds[-1][1] == length, "the chunks must cover everything"
formula.Formula(length // num_chunks).require_right("the last chunk's length", bounds[-1][1] - bounds[-1][0])
print("bounds:", bounds)'''
HIDDEN_1 = '''draw = random.Random(SEED + 1)
for _ in range(3):
    num_chunks = draw.randrange(2, 9)
    length = num_chunks * draw.randrange(100) + draw.randrange(1, num_chunks)
    print("hidden 1:", sum((i + 1) * stop for i, (_, stop) in enumerate(chunk_bounds(length, num_chunks))))'''
TOTAL = '''def ring_sent(num_bytes, world_size):
    """Bytes that each rank of a ring all-reduce sends."""
    ### BEGIN SOLUTION
    return 2 * (world_size - 1) * num_bytes // world_size
    ### END SOLUTION
'''
CHECK_2 = '''num_bytes = 24 * random.Random(SEED + 2).randrange(1, 10**6)
sent = formula.Formula(2 * 3 * num_bytes / 4).require_right("what is sent", ring_sent(num_bytes, 4))
print(f"sent: {sent:.0f} {ring_sent(num_bytes, 3):.0f}")'''
HIDDEN_2 = '''draw = random.Random(SEED + 3)
print("hidden 2:", [ring_sent(n * draw.randrange(1, 10**6), n) for n in (2, 5, 8)])'''


def attack_lab(num_exercises: int = 2) -> NotebookNode:
    """One exercise or two, without torch: quick to grade. 2 + 1 points."""
    cells = [
        new_markdown_cell("# A lab to attack"), _cell(SETUP, id="setup", kind="setup"),
        _cell("SEED = 3", id="seed", kind="parameters"),
        _cell(BOUNDS, id="bounds", kind="answer", exercise=1),
        _cell(CHECK_1, id="check-1", kind="check", exercise=1, points=2),
        _cell(HIDDEN_1, id="hidden-1", kind="check", exercise=1, points=0, hidden=True),
        _cell(TOTAL, id="sent", kind="answer", exercise=2),
        _cell(CHECK_2, id="check-2", kind="check", exercise=2, points=1),
        _cell(HIDDEN_2, id="hidden-2", kind="check", exercise=2, points=0, hidden=True)]
    return _lab(cell for cell in cells if marks(cell).get("exercise", 1) <= num_exercises)


def twice_lab() -> NotebookNode:
    """The first exercise two times, the second time with the answer cell `again`: each can have limits of its own."""
    lab = attack_lab(1)
    again = [(BOUNDS, {"id": "again", "kind": "answer"}),
             (CHECK_1, {"id": "check-again", "kind": "check", "points": 2}),
             (HIDDEN_1, {"id": "hidden-again", "kind": "check", "points": 0, "hidden": True})]
    return _lab([*lab.cells, *(_cell(source, exercise=2, **mark) for source, mark in again)])


TORCH_SETUP = """import torch
import torch.distributed as dist
from book.launch import launch, rank_device


def my_numbers(length):
    generator = torch.Generator().manual_seed(1000 * SEED + dist.get_rank())
    return torch.randint(-1000, 1000, (length,), generator=generator).double().to(rank_device())"""
MEAN = '''def mean(buffer):
    """The mean of `buffer` over all ranks, in place."""
    ### BEGIN SOLUTION
    dist.all_reduce(buffer)
    buffer /= dist.get_world_size()
    ### END SOLUTION
'''
RING = '''def ring_all_reduce(buffer):
    """Sum `buffer` over all ranks, in place, in a ring of messages."""
    ### BEGIN SOLUTION
    rank, size = dist.get_rank(), dist.get_world_size()
    chunks = buffer.tensor_split(size)
    for step in range(2 * (size - 1)):
        mine = chunks[(rank - step - 1) % size]
        came = torch.empty_like(mine)
        transfers = [dist.P2POp(dist.isend, chunks[(rank - step) % size], (rank + 1) % size),
                     dist.P2POp(dist.irecv, came, (rank - 1) % size)]
        for request in dist.batch_isend_irecv(transfers):
            request.wait()
        mine.copy_(came + mine if step < size - 1 else came)
    ### END SOLUTION
'''
ON_RANKS = '''def on_ranks(length):
    rank_device()
    dist.init_process_group()
    buffer = my_numbers(length)
    {call}(buffer)
    return buffer.cpu()


after = launch(on_ranks, 2, {length}, timeout_s=40, hang_s=2)
print([sum((i + 1) * x for i, x in enumerate(buffer.tolist())) for buffer in after])'''


def ranks_lab() -> NotebookNode:
    """A ring that is also tried over the wire, and a mean, on two real ranks. 2 + 1 points."""
    return _lab([
        _cell(TORCH_SETUP, id="setup", kind="setup"), _cell("SEED = 3", id="seed", kind="parameters"),
        _cell(RING, id="ring", kind="answer", exercise=1),
        _cell(ON_RANKS.format(call="ring_all_reduce", length=9), id="check-1", kind="check", exercise=1, points=2,
              wire="ring_all_reduce"),
        _cell(MEAN, id="mean", kind="answer", exercise=2),
        _cell(ON_RANKS.format(call="mean", length=9), id="check-2", kind="check", exercise=2, points=1)])


def _lab(cells: Iterable[NotebookNode]) -> NotebookNode:
    lab = new_notebook(cells=list(cells))
    lab.metadata["lockstep"] = {"points": sum(points(lab).values())}
    for number, cell in enumerate(lab.cells):
        cell.id = f"cell-{number}"
    return lab


def _cell(source: str, **mark: Any) -> NotebookNode:
    cell = new_code_cell(source.rstrip("\n"))
    cell.metadata["lockstep"] = mark
    if mark.get("hidden"):
        cell.metadata["tags"] = ["remove-cell"]
    return cell


def answered(lab: NotebookNode, **answers: str | None) -> NotebookNode:
    """A copy of a lab as handed in, with the named answer cells replaced by other sources, or removed."""
    copy = nbformat.from_dict(json.loads(nbformat.writes(lab)))
    kept = [cell for cell in copy.cells if not marks(cell).get("hidden")]
    copy.cells = [cell for cell in kept if answers.get(marks(cell).get("id"), "") is not None]
    for cell in code_cells(copy):
        cell.source = answers.get(marks(cell)["id"], cell.source)
    return copy


@dataclass(frozen=True)
class Attack:
    """An attack's name, the exercise it is an answer to, the prefix of its final status, its code, what it needs."""
    name: str
    exercise: int
    ends: str
    code: str
    needs: str = ""

    def skip_without_its_wall(self) -> None:
        """Skip the test where this attack's wall can't be built."""
        if self.needs and not forks_sandboxes():
            pytest.skip("no sandbox can be forked here: the system forbids it, or Python lies in /tmp")

    def source(self, **values: Any) -> str:
        """The code for an answer cell, behind a fuse, with named values filled in."""
        code = self.code
        for name, value in values.items():
            code = code.replace(f"@{name.upper()}@", str(value))
        return FUSE + code


def attacks(kind: str) -> list[Attack]:
    """The attacks in a folder of tests/attacks/."""
    found = []
    for path in sorted((ATTACKS / kind).glob("*.py")):
        head, code = path.read_text("utf-8").split("\n\n", 1)
        marked = dict(line.removeprefix("# ").split(":", 1) for line in head.splitlines())
        if "right if" in marked:
            code += RIGHT_IF.format(holds=marked["right if"].strip())
        found.append(Attack(path.stem, int(marked["exercise"]), marked["ends"].strip(), code,
                            marked.get("needs", "").strip()))
    return found


@cache
def forks_sandboxes() -> bool:
    """Whether warm processes can make sandboxes here; else grading starts each job in bubblewrap."""
    def forks() -> bool:
        with closing(Warm(attack_lab())) as warm:
            return warm.works()

    return once("forks-sandboxes", forks)


@dataclass
class Course:
    """A lab, a folder of submissions, a folder for the results, and the user who grades."""
    folder: Path
    lab: NotebookNode
    as_nobody: bool = False
    explains: bool = False  # run what failed once more for the student's page

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
                 str(self.folder / "submissions"), "-o", str(self.folder / "results"),
                 *([] if self.explains else ["--no-feedback"]), *options]
        if not self.as_nobody:
            return grade
        for path in [self.folder, *self.folder.rglob("*")]:
            os.chown(path, 65534, 65534, follow_symlinks=False)
        drop = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "--"]
        seen = sandbox.reachable([*sandbox.pythons(), sandbox.BOOK, self.folder], bind="--bind")
        return ["bwrap", "--dev-bind", "/", "/", *seen, "--die-with-parent", "--", *drop, *grade]

    def grade(self, *options: str, timeout_s: float = 900) -> subprocess.CompletedProcess:
        """Grades, in its own working folder, and returns what was printed."""
        return subprocess.run(self.command("-j", "2", *options), capture_output=True, text=True, timeout=timeout_s,
                              cwd="/", env=self.environment())

    def environment(self) -> dict[str, str]:
        """This process's environment, with the temporary folder of the run."""
        return {**os.environ, "PYTHONPATH": str(sandbox.BOOK.parent), "TMPDIR": str(self.temporary)}

    @cached_property
    def temporary(self) -> Path:
        """The run's temporary folder, with a short path: whatever remains in it was left behind."""
        folder = Path(tempfile.mkdtemp(prefix="lt-", dir="/tmp"))
        folder.chmod(0o777)
        weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
        return folder

    def narrow(self, allowances_s: dict[int, float], **limits: int) -> None:
        """Gives the submissions that are not graded yet less time than the references do, and other limits.

        `allowances_s` are by exercise.
        """
        path = self.folder / "results" / "references.json"
        references = json.loads(path.read_text())
        for number, reference in references.items():
            spared = ALLOWANCE_S - allowances_s[int(number)]
            reference["limits"]["wall_s"] -= spared
            reference["limits"]["cell_s"] -= spared / 2
            reference["limits"].update(limits)
        path.write_text(json.dumps(references))

    def record(self, name: str) -> dict[str, Any]:
        """A student's record."""
        return json.loads((self.folder / "results" / "private" / f"{name}.json").read_text())

    def left_behind(self) -> tuple[list[Path], list[str]]:
        """Temporary folders and processes that the run left behind."""
        processes = []
        for process in psutil.process_iter(["cmdline"]):
            line = " ".join(process.info["cmdline"] or [])
            if str(self.temporary) in line or str(self.folder) in line:
                processes.append(line)
        return list(self.temporary.iterdir()), processes
