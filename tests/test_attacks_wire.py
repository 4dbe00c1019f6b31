"""Exercises on real ranks: fake rings, and ranks that forge, wait and leave, each next to an honest submission."""
from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.attack_lab import BLOWN, MEAN, RING, USERS, Attack, Course, answered, attacks, torch_lab

OVER_THE_WIRE = attacks("wire")
WAITS = "def mean(buffer):\n    if dist.get_rank() == 0:\n        dist.all_reduce(buffer)\n"


def graded(folder: Path, tried: Sequence[Attack], as_nobody: bool = False) -> Course:
    """All rings graded in one run, with an honest one."""
    course = Course(folder, torch_lab("ring_all_reduce", RING, wire="ring_all_reduce"), as_nobody)
    course.hand_in("victim", answered(course.lab))
    for attack in tried:
        course.hand_in(attack.name, answered(course.lab, answer=attack.source(ring=RING)))
    run = course.grade(timeout_s=1500)
    assert run.returncode == 0, run.stderr
    return course


@pytest.fixture(scope="module")
def over_the_wire(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Course:
    """The attacks whose tests are run, graded together: one takes 20 s, and `make sample` draws only some."""
    chosen = [item.callspec.params.get("attack") for item in request.session.items
              if item.path == request.path and isinstance(item, pytest.Function) and hasattr(item, "callspec")]
    return graded(tmp_path_factory.mktemp("wire"), [attack for attack in OVER_THE_WIRE if attack in chosen])


@pytest.mark.parametrize("attack", OVER_THE_WIRE, ids=lambda attack: attack.name)
def test_anything_but_a_ring_gets_no_points(over_the_wire: Course, attack: Attack) -> None:
    exercise = over_the_wire.record(attack.name)["exercises"]["1"]
    assert exercise["points"] == 0 and exercise["status"].startswith(attack.ends), exercise
    assert BLOWN not in json.dumps(exercise)
    assert [check["passed"] for check in exercise["checks"]] == [True]  # to gloo's ranks it looks right


def test_an_honest_ring_keeps_all_points(over_the_wire: Course) -> None:
    assert over_the_wire.record("victim")["points"] == 3
    assert over_the_wire.left_behind() == ([], [])


@pytest.mark.skipif("nobody" not in USERS, reason="these tests are not run by root")
def test_an_unprivileged_users_ranks_are_contained_too(tmp_path: Path) -> None:
    """Their sandboxes are built differently, so the most harmful attacks are repeated."""
    tried = [attack for attack in OVER_THE_WIRE if attack.name in ("another_way", "memory")]
    course = graded(tmp_path, tried, as_nobody=True)
    ended = {attack.name: course.record(attack.name)["exercises"]["1"] for attack in tried}
    assert len(ended) == 2 and course.record("victim")["points"] == 3 and course.left_behind() == ([], [])
    for attack in tried:
        assert ended[attack.name]["points"] == 0 and ended[attack.name]["status"].startswith(attack.ends), ended


@pytest.mark.parametrize("user", USERS)
def test_ranks_that_wait_forever_block_no_other_job(user: str, tmp_path) -> None:
    course = Course(tmp_path, torch_lab("mean", MEAN), user == "nobody")
    course.hand_in("victim", answered(course.lab))
    course.hand_in("attacker", answered(course.lab, answer=WAITS))
    run = course.grade(timeout_s=900)
    assert run.returncode == 0, run.stderr
    waiting, honest = course.record("attacker"), course.record("victim")
    assert honest["points"] == 3 and waiting["points"] == 0 and BLOWN not in json.dumps(waiting)
    assert waiting["exercises"]["1"]["status"] == "a check failed" and "HangError" in waiting["exercises"]["1"]["log"]
    assert course.left_behind() == ([], [])
