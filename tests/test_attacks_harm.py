"""Submissions that kill, hang, flood and fill, each graded at the same time as an honest one, which is unaffected."""
from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.attack_lab import BLOWN, USERS, Attack, Course, answered, attack_lab, attacks

HARMFUL = attacks("harm")
# What comes of these depends on the grader's user. What the others do, such as printing without end, does not.
BY_USER = {"fork_bomb", "full_disks", "full_run_folder", "kill_all", "memory_many", "orphan"}
LIMITS = {"memory_bytes": 1 << 30, "scratch_bytes": 64 << 20, "num_processes": 64}


@pytest.fixture(scope="class")
def graded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Course:
    """A run whose references the others reuse, so that they are made only once."""
    course = Course(tmp_path_factory.mktemp("base"), attack_lab(), request.cls.as_nobody)
    course.hand_in("victim", answered(course.lab))
    run = course.grade()
    assert run.returncode == 0 and course.record("victim")["points"] == 3, run.stdout + run.stderr
    return course


class Harm:
    """Two jobs run side by side: the victim's first runs during the attack."""
    as_nobody = False

    def test_the_victim_keeps_everything(self, graded: Course, attack: Attack, tmp_path: Path) -> None:
        course = Course(tmp_path, graded.lab, graded.as_nobody)
        victim = course.hand_in("victim", answered(course.lab))
        course.hand_in("attacker", answered(course.lab, bounds=attack.source(folder=course.folder)))
        course.goes_on_from(graded, **LIMITS)
        before = victim.read_bytes()
        run = course.grade()
        assert run.returncode == 0, run.stderr
        harmed, harmless = course.record("attacker"), course.record("victim")
        # Two limits stop the process that fills memory, and a loaded machine decides which: its own, or the job's.
        either = attack.name == "memory_one"
        ends = (attack.ends, "stopped: memory limit") if either else attack.ends
        assert harmed["points"] == 1 and harmed["exercises"]["1"]["status"].startswith(ends), harmed
        assert harmless["points"] == 3 and harmless["error"] is None
        tried, retry = (harmed["exercises"]["1"].get(key) for key in ("tried", "retry"))
        assert (tried == 2) == bool(retry) or either
        assert BLOWN not in json.dumps(harmed) and victim.read_bytes() == before
        assert {p.name for p in (course.folder / "results" / "students").iterdir()} == {
            f"{name}.{kind}" for name in ("attacker", "victim") for kind in ("json", "html", "gradescope.json")}
        assert course.left_behind() == ([], [])


@pytest.mark.parametrize("attack", HARMFUL, ids=lambda attack: attack.name)
class TestHarmAsSelf(Harm):
    """As the user who runs the tests. (Users have classes, so that they can be tested side by side.)"""


if "nobody" in USERS:
    @pytest.mark.parametrize("attack", [attack for attack in HARMFUL if attack.name in BY_USER],
                             ids=lambda attack: attack.name)
    class TestHarmAsNobody(Harm):
        """As a user without rights, when root runs the tests."""
        as_nobody = True
