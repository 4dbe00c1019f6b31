"""Submissions are only data: files that are not notebooks, cells with false claims, names with meaning elsewhere.

And the run that grades them: it can be killed and resumed, and without a sandbox it starts only if it is told to.
"""
from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from nbformat.v4 import new_code_cell, new_output

from book.grading import sandbox
from book.grading.grade import grade
from book.grading.handed_in import find, slug
from book.grading.lab import code_cells, marks
from book.grading.warm import Warm
from tests.attack_lab import USERS, Course, answered, attack_lab, attacks

pytestmark = pytest.mark.slow
LIMIT_S = 600
NOTHING = "def chunk_bounds(length, num_chunks):\n    return []\n"
NAMES = ["=HYPERLINK(\"http:x\",\"grade\")", "<script>alert(1)</script>", "two\nlines", "\x1b[2Jcleared",
         "\u202egnp.exe", "@sum(1)", "n" * 200, "\u7b14\u7b14"]
NOT_UTF8 = os.fsdecode(b"caf\xe9")


def cheat(course: Course, name: str, **changes: Any) -> None:
    """Hands in a wrong exercise 1 with a changed check cell, and no exercise 2."""
    notebook = answered(course.lab, bounds=NOTHING, sent=None)
    for cell in code_cells(notebook):
        if marks(cell)["id"] == changes.get("cell", "check-1"):
            cell.source = changes.get("source", cell.source)
            cell.metadata["lockstep"].update(changes.get("mark", {}))
            cell.metadata["tags"] = changes.get("tags", [])
            cell.outputs, cell.execution_count = changes.get("outputs", []), changes.get("count")
    course.hand_in(name, notebook)


def cheats(course: Course) -> dict[str, int]:
    """Notebooks whose cells make false claims about the lab. Returns the points that the answers of each deserve."""
    said = [new_output("stream", name="stdout", text="anything\n")]
    cheat(course, "edited", source="print('bounds: yes')", outputs=said, count=1)
    cheat(course, "tagged", tags=["raises-exception", "nbval-skip", "nbval-ignore-output", "skip"], count=1)
    cheat(course, "rich", mark={"points": 100, "kind": "check", "hidden": False})
    cheat(course, "setup", mark={"kind": "setup"}, source="print('bounds: yes')", count=1)
    cheat(course, "other-exercise", mark={"exercise": 2, "points": 3})
    cheat(course, "never-run", outputs=said, count=None)
    cheat(course, "own-seed", cell="seed", source="SEED = 3\nchecks = None")
    cheat(course, "own-setup", cell="setup", source="raise SystemExit")
    twice = answered(course.lab, sent=None)
    twice.cells.append(answered(course.lab, bounds=NOTHING).cells[3])
    course.hand_in("twice", twice)
    claims = answered(course.lab, bounds=NOTHING, sent=None)
    cell = new_code_cell("def chunk_bounds(*args):\n    return 7")
    cell.metadata["lockstep"] = {"id": "hidden-1", "kind": "check", "exercise": 1, "points": 50, "hidden": True}
    claims.cells.append(cell)
    course.hand_in("own-hidden", claims)
    names = ("edited", "tagged", "rich", "setup", "other-exercise", "never-run", "own-seed", "own-setup", "twice",
             "own-hidden")
    return dict.fromkeys(names, 0)


def files(course: Course) -> dict[str, str]:
    """Files that are not notebooks. Returns the message for each."""
    folder, said = course.folder / "submissions", {}

    def put(name: str, text: str | bytes, error: str) -> None:
        (folder / f"{name}.ipynb").write_bytes(text if isinstance(text, bytes) else text.encode())
        said[name] = error

    put("empty", "", "the file is not a notebook")
    put("half", '{"cells": [{"cell_type": "code", "source"', "the file is not a notebook")
    put("bytes", bytes(range(256)) * 9, "the file is not a notebook")
    put("deep", "[" * 100_000, "the file is not a notebook")
    put("list", "[1, 2, 3]", "the file is not a notebook")
    put("cells", '{"cells": {"cell_type": "code"}}', "the file is not a notebook")
    put("number", '{"cells": [' + "9" * 100_000 + "]}", "the file is not a notebook")
    put("huge", b'{"cells": []}' + b" " * (8 << 20), "the file is larger than 8 MiB")
    (folder / "link.ipynb").symlink_to(folder / "victim.ipynb")
    (folder / "lost.ipynb").symlink_to("/etc/shadow")
    os.mkfifo(folder / "pipe.ipynb")
    (folder / "nothing").mkdir()
    (folder / "linked").mkdir()
    (folder / "linked" / "lab.ipynb").symlink_to(folder / "victim.ipynb")
    said.update(dict.fromkeys(("link", "lost", "linked"), "the file can't be opened"))
    return said | {"pipe": "this is not a regular file", "nothing": "no notebook was found"}


def strange(course: Course) -> list[str]:
    """Notebooks that can be read but have odd contents; none has a right answer. Returns their names."""
    mark = {"lockstep": {"id": "bounds"}}
    cells = {"nan": [{"cell_type": "code", "metadata": mark, "source": [float("nan")], "execution_count": 1e999}],
             "types": [1, None, "code", [], {}, {"cell_type": 7}, {"cell_type": "code", "metadata": 3, "source": None},
                       {"cell_type": "code", "metadata": {"lockstep": ["id"]}, "source": {"a": 1}},
                       {"cell_type": "code", "metadata": {"lockstep": {"id": {"a": 1}}}, "source": "x"}],
             "surrogates": [{"cell_type": "code", "metadata": mark, "source": "x = '\ud800\udfff'\n# \x00\x1b[2J"}],
             "nested": [{"cell_type": "code", "metadata": mark, "source": json.loads("[" * 300 + "]" * 300)}],
             "long": [{"cell_type": "code", "metadata": mark, "source": "[" + "1," * 3_000_000 + "]"}],
             "ids": [{"cell_type": "code", "id": "=1+1<script>", "metadata": {"lockstep": {"id": "=1+1<script>"}},
                      "source": "import book.legacy"}]}
    for name, held in cells.items():
        (course.folder / "submissions" / f"{name}.ipynb").write_text(json.dumps({"cells": held, "nbformat": "x"}))
    return list(cells)


def neighbours(course: Course) -> None:
    """A right submission in a folder full of files that a program started there would run."""
    folder = course.folder / "submissions" / "neighbours"
    folder.mkdir()
    course.hand_in("neighbours/lab", answered(course.lab))
    for name in ("conftest.py", "random.py", "nbformat.py", "pytest.py", "sitecustomize.py", ".pdbrc", "pytest.ini",
                 "book.py"):
        (folder / name).write_text(f"open({str(course.folder / 'was-run')!r}, 'w')\nraise SystemExit\n")


@dataclass
class Graded:
    """The course, and the expected results of its submissions."""
    course: Course
    printed: str
    points: dict[str, int]
    errors: dict[str, str]
    names: list[str]
    strange: list[str]


@pytest.fixture(scope="module", params=USERS)
def graded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Graded:
    """All of it in one run. Which files can be opened depends on the user; what is read from them does not."""
    course = Course(tmp_path_factory.mktemp("files"), attack_lab(), request.param == "nobody")
    course.hand_in("victim", answered(course.lab))
    points, odd = ({}, []) if course.as_nobody else (cheats(course), strange(course))
    errors = files(course)
    neighbours(course)
    names = [*NAMES, NOT_UTF8]
    for name in names:
        (course.folder / "submissions" / name.replace("/", "\u2215")).mkdir()
    if course.as_nobody:
        (course.folder / "submissions" / "closed").mkdir(mode=0)
        errors["closed"] = "the folder can't be read"
    run = course.grade(timeout_s=1500)
    assert run.returncode == 0, run.stderr
    assert course.left_behind() == ([], [])
    return Graded(course, run.stdout, points, errors, [name.replace("/", "\u2215") for name in names], odd)


@pytest.mark.parametrize("graded", USERS[:1], indirect=True)
def test_cells_are_scored_by_their_answers(graded: Graded) -> None:
    records = {name: graded.course.record(name) for name in graded.points}
    assert {name: record["points"] for name, record in records.items()} == graded.points
    assert {record["max_points"] for record in records.values()} == {3}
    told = {name: [note for note in record["notes"] if "changes nothing" in note] for name, record in records.items()}
    assert told["edited"] and told["setup"] and told["own-setup"] and not told["own-seed"]
    assert records["twice"]["notes"] == ["cell bounds appears twice", "answer cell sent is missing"]


def test_a_file_that_is_not_a_notebook_is_explained_in_a_sentence(graded: Graded) -> None:
    for name, error in graded.errors.items():
        record = graded.course.record(name)
        assert record["points"] == 0 and record["error"].startswith(error), name
    assert "root:" not in json.dumps(graded.course.record("lost"))


@pytest.mark.parametrize("graded", USERS[:1], indirect=True)
def test_readable_notebooks_are_graded(graded: Graded) -> None:
    for name in graded.strange:
        record = graded.course.record(name)
        assert record["points"] == 0 and record["error"] is None, name


def test_honest_submissions_keep_all_points(graded: Graded) -> None:
    assert graded.course.record("victim")["points"] == graded.course.record("neighbours")["points"] == 3
    assert not (graded.course.folder / "was-run").exists()


def test_names_are_inert_in_the_reports(graded: Graded) -> None:
    results = graded.course.folder / "results"
    table, page = (results / "grades.csv").read_text("utf-8-sig"), (results / "index.html").read_text("utf-8")
    assert not [line for line in table.splitlines() if line.lstrip('"')[:1] in tuple("=+-@\t|%")]
    assert "<script" not in page and "&lt;script&gt;" in page
    for text in (table, page, graded.printed):
        assert not [c for c in text if (ord(c) < 32 and c not in "\r\n") or c in "\u202e\udce9"]
    for name in graded.names:
        assert (results / "private" / f"{slug(name)}.json").exists() and Path(slug(name)).name == slug(name)
    listed = [record["student"] for record in json.loads((results / "grades.json").read_text())["submissions"]]
    handed_in = 2 + sum(map(len, (graded.points, graded.errors, graded.names, graded.strange)))
    assert len(listed) == len(set(listed)) == handed_in


def wait_for(happened, limit_s: float = LIMIT_S) -> None:
    """Waits until a condition holds."""
    end_s = time.monotonic() + limit_s
    while not happened():
        assert time.monotonic() < end_s
        time.sleep(0.1)


def test_a_run_killed_twice_is_resumed_to_the_same_table(tmp_path: Path) -> None:
    """As an unprivileged user if root runs the tests."""
    course, names = Course(tmp_path, attack_lab(1), USERS[-1] == "nobody"), ("ann", "bob", "cy")
    for name in names:
        course.hand_in(name, answered(course.lab, **({"bounds": NOTHING} if name == "bob" else {})))
    results = course.folder / "results"
    records = [results / "private" / f"{name}.json" for name in names]
    kept: dict[Path, tuple[bytes, int]] = {}
    for record in records[:2]:
        kill_once_there(course, record)
        seen = [results / "run.json", results / "references.json", *(path for path in records if path.exists())]
        for path in seen:
            assert kept.setdefault(path, (path.read_bytes(), path.stat().st_mtime_ns))[0] == path.read_bytes()
    run = course.grade()
    assert run.returncode == 0, run.stderr
    for path, (content, made_ns) in kept.items():
        assert path.read_bytes() == content
        assert path not in records or path.stat().st_mtime_ns == made_ns, "it was run again"
    assert [course.record(name)["points"] for name in names] == [2, 0, 2]
    assert course.left_behind() == ([], [])
    table = (results / "grades.csv").read_bytes()
    shutil.rmtree(results)
    results.mkdir()
    run = course.grade()
    assert run.returncode == 0 and (results / "grades.csv").read_bytes() == table, run.stderr


def kill_once_there(course: Course, record: Path) -> None:
    """Grades until this record is there and more work has begun, then kills the run's whole process group."""
    with subprocess.Popen(course.command("-j", "1"), cwd="/", env=course.environment(), stdout=subprocess.DEVNULL,
                          stderr=subprocess.DEVNULL, start_new_session=True) as run:
        wait_for(lambda: record.exists() or run.poll() is not None)
        wait_for(lambda: list(course.temporary.iterdir()) or run.poll() is not None)
        assert run.poll() is None
        os.killpg(run.pid, signal.SIGKILL)
    wait_for(lambda: not course.left_behind()[1], 60)


def test_where_kernels_cannot_be_forked_each_is_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Warm, "works", lambda warm: False)
    course = Course(tmp_path, attack_lab(1))
    course.hand_in("ann", answered(course.lab))
    (record,) = grade(course.folder / "lab.ipynb", find(course.folder / "submissions", "lab.ipynb"),
                      course.folder / "results", explains=False)
    assert record["points"] == 2, record


def test_without_bubblewrap_nothing_is_run(tmp_path: Path) -> None:
    course = Course(tmp_path, attack_lab())
    course.hand_in("victim", answered(course.lab))
    (tmp_path / "bin").mkdir()
    run = subprocess.run(course.command(), env={**course.environment(), "PATH": str(tmp_path / "bin")}, cwd="/",
                         capture_output=True, text=True, timeout=LIMIT_S)
    assert run.returncode == 1 and not run.stdout and len(run.stderr.splitlines()) == 1
    assert "sandbox" in run.stderr and "bwrap" in run.stderr and "apt install bubblewrap" in run.stderr
    assert not list((course.folder / "results").iterdir()) and course.left_behind() == ([], [])


def test_a_book_that_python_would_not_import_in_the_sandbox_is_refused(tmp_path: Path) -> None:
    """Such as a second clone: its grader would compare what two versions of the book print."""
    course = Course(tmp_path, attack_lab())
    course.hand_in("victim", answered(course.lab))
    shutil.copytree(sandbox.BOOK, tmp_path / "clone" / "book")
    run = subprocess.run(course.command(), env={**course.environment(), "PYTHONPATH": str(tmp_path / "clone")}, cwd="/",
                         capture_output=True, text=True, timeout=LIMIT_S)
    assert run.returncode == 1 and not run.stdout and len(run.stderr.splitlines()) == 1
    assert f"this is the book in {tmp_path / 'clone'}, but submissions would import" in run.stderr
    assert "pip install -e ." in run.stderr and not list((course.folder / "results").iterdir())


def test_without_a_sandbox_an_attack_succeeds(tmp_path: Path) -> None:
    """Grading works if the instructor asks for it, with a warning, and attacks that the sandbox stops can succeed."""
    course = Course(tmp_path, attack_lab(1))
    course.hand_in("victim", answered(course.lab))
    attack = next(one for one in attacks("reach") if one.name == "gradebook")
    code = attack.code.replace("@FOLDER@", str(course.folder))
    course.hand_in("reader", answered(course.lab, bounds=code))
    before = {path: path.read_bytes() for path in (course.folder / "submissions").iterdir()}
    run = course.grade("--unsafe-no-sandbox")
    assert run.returncode == 0 and "*  NO SANDBOX." in run.stderr
    assert course.record("victim")["points"] == course.record("reader")["points"] == 2
    assert {path: path.read_bytes() for path in (course.folder / "submissions").iterdir()} == before
    assert course.left_behind() == ([], [])
