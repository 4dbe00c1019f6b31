"""A killed grading run can be resumed; without a sandbox nothing runs unless the instructor explicitly asks for it."""
from __future__ import annotations

import shutil
import subprocess
import time
from pathlib import Path

import pytest

from book.grading import sandbox
from tests.attack_lab import USERS, Course, answered, attack_lab, attacks

LIMIT_S = 600


def wait_for(happened, limit_s: float = LIMIT_S) -> None:
    """Waits until a condition holds."""
    end_s = time.monotonic() + limit_s
    while not happened():
        assert time.monotonic() < end_s
        time.sleep(0.1)


@pytest.mark.parametrize("user", USERS)
def test_a_killed_run_is_resumed(user: str, tmp_path: Path) -> None:
    course = Course(tmp_path, attack_lab(), user == "nobody")
    for name in ("ann", "bob", "cem"):
        course.hand_in(name, answered(course.lab, bounds=None))
    results = course.folder / "results"
    first = results / "students" / "ann.json"
    with subprocess.Popen(course.command("-j", "1"), cwd="/", env=course.environment(), stdout=subprocess.DEVNULL,
                          stderr=subprocess.DEVNULL) as run:
        wait_for(lambda: first.exists() or run.poll() is not None)
        wait_for(lambda: list(course.temporary.iterdir()) or run.poll() is not None)  # bob's job has begun
        assert run.poll() is None
        run.kill()
    wait_for(lambda: not course.left_behind()[1], 60)
    seed, kept, graded = (results / "run.json").read_bytes(), first.read_bytes(), first.stat().st_mtime_ns
    references = (results / "references.json").read_bytes()
    run = course.grade()
    assert run.returncode == 0, run.stderr
    assert (results / "run.json").read_bytes() == seed
    assert (results / "references.json").read_bytes() == references
    assert first.read_bytes() == kept and first.stat().st_mtime_ns == graded  # not run again
    assert [course.record(name)["points"] for name in ("ann", "bob", "cem")] == [1, 1, 1]
    assert course.left_behind() == ([], [])


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
    course = Course(tmp_path, attack_lab())
    course.hand_in("victim", answered(course.lab))
    attack = next(one for one in attacks("reach") if one.name == "gradebook")
    code = attack.code.replace("@FOLDER@", str(course.folder))
    course.hand_in("reader", answered(course.lab, bounds=code, sent=None))
    before = {path: path.read_bytes() for path in (course.folder / "submissions").iterdir()}
    run = course.grade("--unsafe-no-sandbox")
    assert run.returncode == 0 and "*  NO SANDBOX." in run.stderr
    assert course.record("victim")["points"] == 3 and course.record("reader")["points"] == 2
    assert {path: path.read_bytes() for path in (course.folder / "submissions").iterdir()} == before
    assert course.left_behind() == ([], [])
