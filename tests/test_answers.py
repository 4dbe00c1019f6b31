"""Answers that learners really give: every wrong one fails with its own message, every right one passes.

A right one also prints, in every check, what the lab's own solution printed: grading compares just that. A file in
answers/NAME/ is headed `# exercise: 3` and `# expect: pass` or `# expect: part of the message`. It replaces that
exercise's answer cell in labs/NAME.ipynb; the other answers are the lab's own. All run in this one process.

`make answers` runs all of them, `make test` one of each of some families: which ones changes from commit to commit.
"""
import contextlib
import io
import linecache
import re
import subprocess
from functools import cache
from pathlib import Path

import nbformat
import pytest

from book.checks import CheckFailed
from book.grading.lab import marks, points, shown
from book.launch import LaunchError
from tests.families import drawn, family, strings

HERE = Path(__file__).parent
LABS = {path.stem: nbformat.read(path, as_version=4) for path in sorted((HERE.parent / "labs").glob("*.ipynb"))}
ANSWERS = sorted((HERE / "answers").glob("*/*.py"))
# How many families of a lab `make test` runs: the answers of the last lab train on 8 ranks, and take ten times as long.
NUM_FAMILIES = {name: 18 for name in LABS} | {"07_hybrid_3d": 8}


def headed(path):
    """The exercise number, what to expect, and the code of an answer file."""
    head, _, body = path.read_text().partition("\n\n")
    fields = dict(line.removeprefix("# ").split(": ", 1) for line in head.splitlines())
    return int(fields["exercise"]), fields["expect"], body


def run_lab(lab, exercise, answer, name):
    """Runs the lab's cells up to the checks of `exercise`, with `answer` in the place of its answer cell.

    No player, panel or timing is run: it is the answer that is on trial. Returns what each check printed, by its id.
    """
    printed = {}
    namespace = {"__name__": "__main__"}  # as in a kernel: RPC finds a class by that name
    for cell in (c for c in lab.cells if c.cell_type == "code"):
        mark = marks(cell)
        if mark["kind"] == "check" and mark["exercise"] != exercise:
            continue
        if shown(cell):
            continue
        source = answer if (mark["kind"], mark.get("exercise")) == ("answer", exercise) else cell.source
        filename = f"<ipython-input-{name}-{mark['id']}>"  # launch shows a cell's line where a rank fails
        linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)
        with contextlib.redirect_stdout(io.StringIO()) as told:
            exec(compile(source, filename, "exec"), namespace)
        if mark["kind"] == "check":
            printed[mark["id"]] = without_device(told.getvalue())
    return printed


def without_device(text):
    """What a cell printed, without the line in which `launch` tells once what the ranks run on."""
    return re.sub(r"\d+ ranks? on \w+ \([^\n]*\n", "", text)


def stored(lab, name):
    """What a check of the lab printed when its outputs were stored."""
    cell = next(c for c in lab.cells if marks(c).get("id") == name)
    return without_device("".join(out["text"] for out in cell.outputs if out.get("name") == "stdout"))


def daily(lab):
    """The answers of a lab that `make test` runs at this commit."""
    own = [(*headed(path)[:2], path.stem) for path in ANSWERS if path.parent.name == lab]
    known = strings(LABS[lab])
    families = [(family(known, exercise, expected), name) for exercise, expected, name in own]
    return drawn(families, NUM_FAMILIES[lab], lab + commit())


@cache
def commit():
    """The commit that is checked out; an empty string where there is no repository."""
    return subprocess.run(["git", "rev-parse", "HEAD"], cwd=HERE, text=True, capture_output=True).stdout


class LabsAnswers:
    """The tests of one lab. Each lab has a class, so that labs can be tested side by side."""
    name: str
    path: Path

    @pytest.mark.slow
    def test_answer(self, answer):
        exercise, expected, body = headed(answer)
        lab = LABS[self.name]
        if expected == "pass":
            printed = run_lab(lab, exercise, body, answer.stem)
            assert printed and printed == {name: stored(lab, name) for name in printed}
            return
        with pytest.raises((CheckFailed, LaunchError)) as caught:
            run_lab(lab, exercise, body, answer.stem)
        assert expected in str(caught.value)

    def test_there_are_enough_answers(self):
        heads = [headed(p) for p in ANSWERS if p.parent.name == self.name]
        expectations = [expected for _, expected, _ in heads]
        wrong = [e for e in expectations if e != "pass"]
        assert len(wrong) >= 12 and len(expectations) - len(wrong) >= 4
        assert len({(e, x) for x, e, _ in heads if e != "pass"}) == len(wrong), "each has a message of its own"
        assert {exercise for exercise, _, _ in heads} == points(LABS[self.name]).keys(), "every exercise is tried"


def pytest_generate_tests(metafunc):
    if "answer" in metafunc.fixturenames:
        lab = metafunc.cls.name
        own, taken = [path for path in ANSWERS if path.parent.name == lab], daily(lab)
        metafunc.parametrize("answer", [pytest.param(path, id=path.stem, marks=[pytest.mark.full] * (path.stem not in taken))
                                        for path in own])


for _name in LABS:
    _own = {"name": _name, "path": HERE.parent / "labs" / f"{_name}.ipynb"}
    globals()[f"TestLab{_name}"] = type(f"TestLab{_name}", (LabsAnswers,), _own)
