"""Submissions that forge, snoop, reach out and do harm, graded beside honest ones: none gets what it did not earn."""
from __future__ import annotations

import compileall
import ctypes
import fcntl
import io
import json
import os
import platform
import random
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import nbformat
import pytest

from book.checks import formula
from book.grading.sandbox import BOOK
from tests.attack_lab import BLOWN, CHECK_1, USERS, Attack, Course, answered, attack_lab, attacks, twice_lab
from tests.once import once

pytestmark = pytest.mark.slow
REMAINS = attacks("remains")
ANSWER_BOTH = {"hooks", "patched_helpers", "settrace", "thread"}  # what they leave behind could reach exercise 2
WHY = "an exercise that the book itself can answer is answered by it, unless the module is withheld; the report says so"
# What comes of these depends on the grader's user. What the others do, such as printing without end, does not.
BY_USER = {"fork_bomb", "full_disks", "full_run_folder", "kill_all", "memory_many", "orphan"}
ENDLESS = {"displays", "flood", "fork_bomb", "hangs"}  # a time limit alone ends these, and then once more
# Filling disks takes seconds on a loaded machine. Endless attacks stand in exercise 2, whose limit is short.
ALLOWANCES_S = {1: 12, 2: 5}
KINDS = ("json", "html", "gradescope.json")
LIMITS = {"memory_bytes": 1 << 30, "scratch_bytes": 64 << 20, "num_processes": 64}
ADD_KEY, KEYCTL = {"x86_64": (248, 250), "aarch64": (217, 219)}.get(platform.machine(), (-1, -1))  # system calls
READ_NOTE = """import ctypes, sys
sys.exit(ctypes.CDLL(None).syscall(int(sys.argv[1]), 10, -3, b"user", sys.argv[2].encode(), 0) < 0)"""


@dataclass
class Graded:
    """A graded course, what the run left behind, and who connected to the servers outside."""
    course: Course
    printed: str
    victim: bytes
    port: int
    left: tuple[list[Path], list[str]] = ((), ())
    visitors: list[str] = field(default_factory=list)


def listen(family: int, address: object, visitors: list[str]) -> socket.socket:
    """A server that records connections."""
    server = socket.socket(family)
    server.bind(address)
    server.listen()

    def serve() -> None:
        while True:
            try:
                server.accept()[0].close()
            except OSError:
                return
            visitors.append(str(address))

    threading.Thread(target=serve, daemon=True).start()
    return server


@pytest.fixture(scope="class")
def forged(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Graded]:
    """All attacks of a class graded in one run. Most answer only exercise 1."""
    course = Course(tmp_path_factory.mktemp("code"), attack_lab(), request.cls.as_nobody)
    victim, visitors = course.hand_in("victim", answered(course.lab)), []
    servers = [listen(socket.AF_INET, ("", 0), visitors)]
    port = servers[0].getsockname()[1]
    servers += [listen(socket.AF_UNIX, f"\0lockstep-{port}", visitors),
                listen(socket.AF_UNIX, str(course.folder / "listening"), visitors)]
    os.chmod(course.folder / "listening", 0o777)
    for attack in request.cls.tried:
        source = attack.source(folder=course.folder, port=port, host=host())
        rest = {} if attack.name in ANSWER_BOTH else {"sent": None}
        course.hand_in(attack.name, answered(course.lab, bounds=source, **rest))
    leave_note(f"lockstep-{port}")
    locked = hold_lock(port)
    compileall.compile_dir(BOOK / "parallel", quiet=1)  # what is withheld has bytecode beside it
    before = victim.read_bytes()
    run = course.grade(timeout_s=1500)
    assert run.returncode == 0, run.stderr
    yield Graded(course, run.stdout, before, port, course.left_behind(), visitors)
    locked.close()
    for server in servers:
        server.close()


def hold_lock(place: int) -> io.BufferedReader:
    """Holds a lock on a byte of a program that is visible in sandboxes too, until the file is closed."""
    file = open("/usr/bin/env", "rb")
    fcntl.fcntl(file, fcntl.F_SETLK, struct.pack("@hhqqi4x", fcntl.F_RDLCK, os.SEEK_SET, place, 1, 0))
    return file


def leave_note(name: str) -> None:
    """Puts a key into the session keyring, which every process started from here shares."""
    ctypes.CDLL(None).syscall(ADD_KEY, b"user", name.encode(), b"note", 4, -3)


def host() -> str:
    """This machine's own address; sends nothing."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
        except OSError:
            return "127.0.0.1"
        return probe.getsockname()[0]


def test_equal_chunks_fail_with_every_seed() -> None:
    def equal_chunks(length: int, num_chunks: int) -> list[tuple[int, int]]:
        size = length // num_chunks
        return [(chunk * size, (chunk + 1) * size) for chunk in range(num_chunks)]

    for seed in range(1, 40):
        with pytest.raises(AssertionError):
            exec(CHECK_1, {"SEED": seed, "random": random, "formula": formula, "chunk_bounds": equal_chunks})


def students(course: Course) -> set[str]:
    """The files of a run's students."""
    return {path.name for folder in ("students", "private") for path in (course.folder / "results" / folder).iterdir()}


class Forging:
    """Attacks that want points or another's work. (Users have classes, so that they can be tested side by side.)"""
    as_nobody = False
    tried = attacks("forge") + attacks("reach") + REMAINS

    def test_an_attack_gets_only_what_it_earned(self, forged: Graded, attack: Attack) -> None:
        attack.skip_without_its_wall()
        record = forged.course.record(attack.name)
        earned, second = (1, "passed") if attack.name in ANSWER_BOTH else (0, "not answered")
        assert record["points"] == earned and record["max_points"] == 3
        ended = {number: exercise["status"] for number, exercise in record["exercises"].items()}
        assert ended["1"].startswith(attack.ends) and ended["2"] == second
        assert BLOWN not in json.dumps(record)

    def test_the_victim_keeps_everything(self, forged: Graded) -> None:
        record = forged.course.record("victim")
        assert record["points"] == 3 and not record["notes"] and record["error"] is None
        assert (forged.course.folder / "submissions" / "victim.ipynb").read_bytes() == forged.victim
        assert "victim: 3 of 3 points" in forged.printed

    def test_imports_from_the_book_are_reported_to_the_instructor(self, forged: Graded) -> None:
        assert "answers import from the book: book.checks.rings" in forged.course.record("book_itself")["notes"]

    def test_nothing_is_left_and_nothing_was_added(self, forged: Graded) -> None:
        assert forged.left == ([], [])
        names = {path.stem for path in (forged.course.folder / "submissions").iterdir()}
        assert len(names) == 1 + len(self.tried)
        assert students(forged.course) == {f"{name}.{kind}" for name in names for kind in KINDS}
        assert {path.name for path in (forged.course.folder / "results").iterdir()} == {
            "run.json", "references.json", "grades.csv", "grades.json", "index.html", "private", "students"}

    def test_nothing_connected_to_servers_outside(self, forged: Graded) -> None:
        assert not forged.visitors
        socket.create_connection(("127.0.0.1", forged.port)).close()
        end_s = time.monotonic() + 30
        while not forged.visitors and time.monotonic() < end_s:
            time.sleep(0.05)
        assert len(forged.visitors) == 1  # they do listen
        forged.visitors.clear()

    def test_the_note_in_the_keyring_can_be_read_by_others(self, forged: Graded) -> None:
        read = subprocess.run([sys.executable, "-c", READ_NOTE, str(KEYCTL), f"lockstep-{forged.port}"])
        if read.returncode:
            pytest.skip("this machine lets nobody use keyrings")


class TestForging(Forging):
    """As the user who runs the tests."""


if "nobody" in USERS:
    class TestForgingAsNobody(Forging):
        """As a user without rights. What a kernel's own code comes to is the same; what it can reach is not."""
        as_nobody, tried = True, attacks("reach") + REMAINS


def begun() -> dict[str, bytes]:
    """What a grading run keeps of itself and of the lab's own solution, for runs with other limits."""
    with tempfile.TemporaryDirectory() as folder:
        course = Course(Path(folder), twice_lab())
        course.hand_in("absent", answered(course.lab, bounds=None, again=None))
        made = course.grade()
        assert made.returncode == 0, made.stderr
        return {name: (course.folder / "results" / name).read_bytes() for name in ("run.json", "references.json")}


@pytest.fixture(scope="class")
def harmed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Course:
    """Two jobs run side by side: while one does harm, the other is the next attack, or an honest neighbour of its."""
    course = Course(tmp_path_factory.mktemp("harm"), twice_lab(), request.cls.as_nobody)
    for name, content in once("harm-begun", begun).items():
        (course.folder / "results" / name).write_bytes(content)
    course.narrow(ALLOWANCES_S, **LIMITS)
    for attack in request.cls.tried:
        cells = ("again", "bounds") if attack.name in ENDLESS else ("bounds", "again")
        answers = zip(cells, (attack.source(folder=course.folder), None))
        course.hand_in(attack.name, answered(course.lab, **dict(answers)))
        if attack.name in BY_USER:
            course.hand_in(f"{attack.name}-neighbour", answered(course.lab, again=None))
    run = course.grade(timeout_s=1500)
    assert run.returncode == 0, run.stderr
    return course


class Harming:
    """Attacks on the machine and on other jobs."""
    as_nobody = False
    tried = attacks("harm")

    def test_harm_comes_to_nothing(self, harmed: Course, attack: Attack) -> None:
        record = harmed.record(attack.name)
        exercise = record["exercises"]["2" if attack.name in ENDLESS else "1"]
        # Two limits stop the process that fills memory, and a loaded machine decides which: its own, or the job's.
        either = attack.name == "memory_one"
        ends = (attack.ends, "stopped: memory limit") if either else attack.ends
        assert record["points"] == 0 and exercise["status"].startswith(ends), record
        assert (exercise.get("tried") == 2) == bool(exercise.get("retry")) or either
        assert attack.name not in ENDLESS or exercise["status"].startswith("stopped: "), record
        assert BLOWN not in json.dumps(record)

    def test_neighbours_of_harm_keep_everything(self, harmed: Course, tmp_path: Path) -> None:
        neighbours = [path.stem for path in (harmed.folder / "submissions").glob("*-neighbour.ipynb")]
        assert len(neighbours) == len(BY_USER)
        for name in neighbours:
            record = harmed.record(name)
            assert record["points"] == 2 and record["error"] is None, record
        nbformat.write(answered(harmed.lab, again=None), tmp_path / "honest.ipynb")
        handed_in = {(harmed.folder / "submissions" / f"{name}.ipynb").read_bytes() for name in neighbours}
        assert handed_in == {(tmp_path / "honest.ipynb").read_bytes()}
        assert students(harmed) == {f"{path.stem}.{kind}" for path in (harmed.folder / "submissions").iterdir()
                                    for kind in KINDS}
        assert harmed.left_behind() == ([], [])


class TestHarming(Harming):
    """As the user who runs the tests."""


if "nobody" in USERS:
    class TestHarmingAsNobody(Harming):
        """As a user without rights."""
        as_nobody, tried = True, [attack for attack in Harming.tried if attack.name in BY_USER]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Each test of an attack is repeated for those of its class."""
    if "attack" in metafunc.fixturenames:
        metafunc.parametrize("attack", [
            pytest.param(attack, id=attack.name, marks=pytest.mark.xfail(strict=True, reason=WHY))
            if attack in REMAINS else pytest.param(attack, id=attack.name) for attack in metafunc.cls.tried])
