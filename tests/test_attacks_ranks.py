"""Exercises on real ranks: fake rings, ranks that forge, wait and leave, ranks that hold more than they may."""
from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import psutil
import pytest
from nbformat import NotebookNode

from book.grading import ranks as on_ranks, wired
from book.grading.grade import Grader
from book.grading.lab import code_cells, marks, points, read_lab
from book.grading.lab_schema import KEY
from book.grading.ranks import WireRanks
from book.grading.sandbox import Limits
from book.grading.submission import Submission
from book.grading.warm import Warm
from tests.attack_lab import BLOWN, RING, USERS, Attack, Course, answered, attacks, ranks_lab

pytestmark = pytest.mark.slow
OVER_THE_WIRE = attacks("wire")
PREFIX = "lockstep-attacked-"
# An attack that fails before it has done anything would be refused too.
BLUNDER = re.compile(r"NameError|SyntaxError|ImportError|AttributeError|TypeError")
WAITS = "def mean(buffer):\n    if dist.get_rank() == 0:\n        dist.all_reduce(buffer)\n"
LAB = Path(__file__).resolve().parents[1] / "labs" / "04_sharded_data_parallel.ipynb"
STAGES = {3: "Zero1", 4: "Zero2", 5: "Zero3"}
UNIT, CHECKED = 2, (3, 5)  # of the stages that which holds most and that which holds least


@pytest.fixture(scope="module")
def sandboxes() -> Iterator[WireRanks]:
    """Ranks as a grading run has them for one submission, forked from a warm process if that can be."""
    with closing(Warm(ranks_lab(), PREFIX)) as warm:
        with WireRanks(prefix=PREFIX, warm=warm if warm.works() else None) as ranks:
            yield ranks


def over_the_wire(answer: str, ranks: WireRanks) -> dict[str, object]:
    """What a grading run writes down of an answer to the ring, once it has passed its check."""
    return Grader(ranks_lab(), Path())._wired(1, Submission({"ring": [answer]}), ranks)


@pytest.mark.parametrize("attack", OVER_THE_WIRE, ids=lambda attack: attack.name)
def test_anything_but_a_ring_gets_no_points(sandboxes: WireRanks, attack: Attack,
                                            monkeypatch: pytest.MonkeyPatch) -> None:
    attack.skip_without_its_wall()
    monkeypatch.setattr(wired, "HANG_S", 12)  # the attack that tries another way takes 8 s to give up
    monkeypatch.setattr(on_ranks, "Limits", lambda: Limits(memory_bytes=3 << 30))
    told = over_the_wire(attack.source(ring=RING), sandboxes)
    assert told["status"].startswith(attack.ends), told
    assert BLOWN not in json.dumps(told) and not BLUNDER.search(json.dumps(told)), told


def test_a_ring_passes_after_all_of_them_and_nothing_is_left(sandboxes: WireRanks) -> None:
    assert over_the_wire(RING, sandboxes) == {}
    sandboxes.end()
    if sandboxes.warm:
        assert len(sandboxes.warm.processes) == 2, "nbval's, and that of all sandboxes, the one tried first too"
        sandboxes.warm.close()
    assert not list(Path(tempfile.gettempdir()).glob(PREFIX + "*"))
    assert not [one for one in psutil.process_iter(["cmdline"]) if PREFIX in " ".join(one.info["cmdline"] or [])]


def test_ranks_of_a_grading_run_are_contained_and_block_no_other_job(tmp_path: Path) -> None:
    """As an unprivileged user if root runs the tests: sandboxes are built differently for those."""
    course = Course(tmp_path, ranks_lab(), USERS[-1] == "nobody")
    course.hand_in("victim", answered(course.lab))
    tried = [attack for attack in OVER_THE_WIRE if attack.name in ("another_way", "memory")]
    for attack in tried:
        course.hand_in(attack.name, answered(course.lab, ring=attack.source(ring=RING), mean=None))
    course.hand_in("waits", answered(course.lab, ring=None, mean=WAITS))
    run = course.grade(timeout_s=1500)
    assert run.returncode == 0, run.stderr
    assert course.record("victim")["points"] == 3 and course.left_behind() == ([], [])
    ended = {attack.name: course.record(attack.name)["exercises"]["1"] for attack in tried}
    assert len(ended) == 2 and BLOWN not in json.dumps(ended)
    for attack in tried:
        assert ended[attack.name]["points"] == 0 and ended[attack.name]["status"].startswith(attack.ends), ended
        assert [check["passed"] for check in ended[attack.name]["checks"]] == [True]  # to gloo's ranks it looks right
    waiting = course.record("waits")["exercises"]["2"]
    assert waiting["points"] == 0 and waiting["status"] == "a check failed" and "HangError" in waiting["log"]
    assert waiting["tried"] == 2, "the machine may have been to blame"


def sharded_lab() -> NotebookNode:
    """Lab 4's exercises on two stages of ZeRO, and the answers that these need."""
    lab = read_lab(LAB)
    lab.cells = [cell for cell in lab.cells if cell.cell_type != "code" or marks(cell).get("exercise", 3) in CHECKED
                 or (marks(cell)["exercise"] in (UNIT, *STAGES) and marks(cell)["kind"] == "answer")]
    lab.metadata[KEY]["points"] = sum(points(lab).values())
    return lab


def test_plain_data_parallelism_gets_no_points_as_any_zero_stage(tmp_path: Path) -> None:
    """What ranks hold is measured from outside: an answer that silences the checks can't pass as sharded."""
    course = Course(tmp_path, sharded_lab())
    (attack,) = attacks("memory")
    ids = {marks(cell)["exercise"]: marks(cell)["id"] for cell in code_cells(course.lab)
           if marks(cell)["kind"] == "answer"}
    unit, zero_1 = attack.source().split("\n\n\nclass Zero1")
    answers = {ids[UNIT]: unit, ids[3]: f"class Zero1{zero_1}"}
    for exercise, stage in list(STAGES.items())[1:]:
        answers[ids[exercise]] = f"FreedUnit = Unit\n\n\nclass {stage}(Zero{exercise - 3}):\n    pass\n"
    course.hand_in("attacker", answered(course.lab, **answers))
    course.hand_in("victim", answered(course.lab, **{ids[4]: None, ids[5]: None}))
    run = course.grade()
    assert run.returncode == 0, run.stderr
    told = {name: {int(n): (e["points"], e["status"]) for n, e in course.record(name)["exercises"].items()}
            for name in ("attacker", "victim")}
    assert told["victim"][3] == (points(course.lab)[3], "passed")
    assert all(got == 0 and status.startswith(attack.ends) for got, status in told["attacker"].values()), told
    assert course.left_behind() == ([], [])
