"""Answers that learners really give: every wrong one fails with its own message, every right one passes.

A right one also prints, in every check, what the lab's own solution printed: grading compares just that. An answer (see
tests/answers) replaces that exercise's answer cell in its lab; the other answers are the lab's own. All run in this one
process.

`make test-all` runs them; `make test` the labs' own, as it runs their notebooks.
"""
import pickle
import re
from pathlib import Path

import pytest

from book.checks.verdict import CheckFailed
from book.grading.lab import code_cells, marks, points
from book.grading.trial import printed, stored
from book.launch import LaunchError, launch
from book.launch.arguments import _reduced
from book.launch.transfer import pickled
from tests.answers import LABS, PASS, answers, apply, read

HERE = Path(__file__).parent
# Exercises that say something about a run: the run itself calls no answer, and is the same for all of them.
ABOUT_A_RUN = {("03_ring_all_reduce", 4), ("04_sharded_data_parallel", 1), ("07_hybrid_3d", 5), ("10_planner", 1),
               ("10_planner", 2), ("13_slow_jobs", 5)}


RUNS = {}  # pickled, by the pickled call of `launch`
CLASS_ID = re.compile(rb"\x8c\x20[0-9a-f]{32}(?=\x94)")  # random: cloudpickle makes one for each class of a lab


def launch_once(*positional, **named):
    """As `launch`, but the same functions with the same arguments run only once."""
    call = CLASS_ID.sub(b"", pickled((positional, named), _reduced()))
    if call not in RUNS:
        RUNS[call] = pickle.dumps(launch(*positional, **named))
    return pickle.loads(RUNS[call])


def public(lab, exercise):
    """The ids of the checks of an exercise that learners have."""
    return {marks(cell)["id"] for cell in code_cells(lab)
            if marks(cell)["kind"] == "check" and marks(cell)["exercise"] == exercise and not marks(cell).get("hidden")}


class LabsAnswers:
    """The tests of one lab. Each lab has a class, so that labs can be tested side by side."""
    name: str
    path: Path

    @pytest.mark.slow
    def test_answer(self, answer, monkeypatch):
        lab, name = LABS[self.name], answer.name
        if (self.name, answer.exercise) in ABOUT_A_RUN:
            monkeypatch.setattr("book.launch.launch", launch_once)
            name = "alike"  # it names the cells, and with another name their functions would be others
        if answer.expected == PASS:
            texts = printed(lab, answer.exercise, answer.source, name)
            assert texts and texts == {check: stored(lab, check) for check in texts}
            return
        passed = {}
        with pytest.raises((CheckFailed, LaunchError)) as caught:
            printed(lab, answer.exercise, answer.source, name, passed)
        assert answer.expected in str(caught.value)
        assert answer.hidden is (public(lab, answer.exercise) <= passed.keys()), "another check finds it: see HIDDEN"

    def test_there_are_enough_answers(self):
        own, numbers = answers(self.name), points(LABS[self.name]).keys()
        wrong = [answer for answer in own if answer.expected != PASS]
        assert len(wrong) >= 12 and len(own) - len(wrong) >= 4
        expected = {(answer.exercise, answer.expected) for answer in wrong}
        assert len(expected) == len(wrong), "each has a message of its own"
        assert {answer.exercise for answer in own} == numbers, "every exercise is tried"


def pytest_generate_tests(metafunc):
    if "answer" in metafunc.fixturenames:
        lab = metafunc.cls.name
        metafunc.parametrize("answer", answers(lab), ids=lambda answer: answer.name)


for _name in LABS:
    _own = {"name": _name, "path": HERE.parent / "labs" / f"{_name}.ipynb"}
    globals()[f"TestLab{_name}"] = type(f"TestLab{_name}", (LabsAnswers,), _own)


PATCH = ["-    return a", "+    return b", "@@", " def second():", "+    tell()"]
SOURCE = "def first():\n    return a\ndef second():\n    return c"


def test_a_patch_replaces_each_of_its_places():
    assert apply(PATCH, SOURCE) == "def first():\n    return b\ndef second():\n    tell()\n    return c"


def test_dots_stand_for_the_lines_before_the_next_one_or_for_the_rest():
    assert apply([" def first():", "-...", "+    tell()", " def second():"], SOURCE).split("\n") == [
        "def first():", "    tell()", "def second():", "    return c"]
    assert apply(["-    return a", "-...", "+    tell()"], SOURCE) == "def first():\n    tell()"
    with pytest.raises(ValueError, match="0 times"):
        apply(["-    return c", "-...", "-    return a"], SOURCE)


@pytest.mark.parametrize("source, times", [(SOURCE.replace("a", "b"), 0), (SOURCE.replace("c", "a"), 2)])
def test_a_patch_whose_place_is_not_unique_is_refused(source, times):
    with pytest.raises(ValueError, match=f"holds this {times} times, not once:\n    return a"):
        apply(PATCH, source)


def test_the_answers_of_a_file_are_read():
    text = "one: a message: with a colon\n-a\n+\n+b\n\ntwo on one: pass\n+c\n"
    one = ("one", "", "a message: with a colon", ["-a", "+", "+b"])
    assert list(read(text)) == [one, ("two", "one", "pass", ["+c"])]


@pytest.mark.parametrize("head", ["one", "one pass", "one two: pass", "one: "])
def test_an_answer_without_a_name_and_a_message_is_refused(head):
    with pytest.raises(ValueError, match="must read 'name: expected message'"):
        list(read(f"{head}\n-a"))
