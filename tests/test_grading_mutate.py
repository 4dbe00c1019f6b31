"""Small faults in answers: each is real Python, and a lab's checks catch it, or the report says that they do not."""
import ast
from pathlib import Path

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_notebook, new_output

from book.grading import mutate
from book.grading.__main__ import main
from book.grading.lab import LabError, points
from book.grading.lab_schema import KEY
from book.grading.mutations import MUTATIONS, mutants
from book.grading.trial import solution
from tests.answers import HERE as ANSWERS
from tests.answers import LABS

MEAN = """def mean(values):
    total = 0
    for value in values:
        total += value
    return total / len(values)
"""
PUBLIC = """from book.checks.verdict import CheckFailed
if mean([2, 4]) != 3:
    raise CheckFailed('the mean is the sum divided by their number')
print('right')"""
HIDDEN = "assert mean([1]) == 1"


def cell(source, name, kind, printed="", **more):
    outputs = [new_output("stream", name="stdout", text=printed)] if printed else []
    return new_code_cell(source, metadata={KEY: {"id": name, "kind": kind, "exercise": 1, **more}}, outputs=outputs)


def lab(public=PUBLIC, hidden=HIDDEN, printed="right\n"):
    answer = f"### BEGIN SOLUTION\n{MEAN}### END SOLUTION"
    return new_notebook(cells=[cell(answer, "mean", "answer"), cell(public, "check-1", "check", printed, points=1),
                               cell(hidden, "hidden-1", "check", hidden=True)])


def fates(notebook, equivalent=None):
    found = mutate.outcomes(notebook, 100, 0, equivalent or {})
    return {one.mutant.key: (one.verdict, one.explained, one.message) for one in found}


@pytest.mark.parametrize("source, name, after", [
    ("x = a + b", "sign", ["x = a - b"]),
    ("x = a / b", "factor", ["x = a * b"]),
    ("y = x[(rank + step) % n]", "no remainder", ["y = x[rank + step]"]),
    ("for i in range(n):\n    f(i)", "off by one", ["for i in range(n + 1):", "for i in range(n - 1):"]),
    ("if a < b:\n    f()", "end", ["if a <= b:"]),
    ("work.wait()\nf()", "no call", ["", ""]),
    ("x /= n", "no update", [""]),
    ("f(a, b, c)", "exchanged arguments", ["f(b, a, c)"]),
    ("all_reduce(x, group=row)", "wrong group", ["all_reduce(x)"]),
    ("x = broadcast(y, src=0)", "no option", ["x = broadcast(y)"]),
    ("x = y.detach().clone()", "shared memory", ["x = y.detach()", "x = y.clone()"]),
    ("x = min(a, b)", "other name", ["x = max(a, b)"]),
    ("f(async_op=True)", "opposite condition", ["f(async_op=False)"])])
def test_a_mutation_changes_one_thing(source, name, after):
    assert sorted(one.after for one in mutants(source) if one.mutation.name == name) == sorted(after)


@pytest.mark.full
def test_every_kind_of_mutation_is_found_in_the_labs_and_all_mutants_are_python():
    names = set()
    for notebook in LABS.values():
        for exercise in points(notebook):
            source = solution(notebook, exercise)
            found = list(mutants(source))
            assert found and len({one.source for one in found}) == len(found), "each once"
            for one in found:
                assert one.source != ast.unparse(ast.parse(source))
                compile(one.source, "mutant", "exec")
                names.add(one.mutation.name)
    assert names == {mutation.name for mutation in MUTATIONS}


def test_a_mutant_is_caught_by_a_public_check_by_a_hidden_one_or_not_at_all():
    told = fates(lab())
    assert told["return total / len(values) -> return total * len(values)"][:2] == ("public", True)
    assert told["total += value -> "][0] == "public"
    empty = "assert mean([0, 0]) == 0\nprint('right')"
    assert fates(lab(empty))["return total / len(values) -> return total * len(values)"][0] == "survived"
    hidden = "assert mean([0, 0]) == 0 and mean([1, 1]) == 1"
    assert fates(lab(empty, hidden))["return total / len(values) -> return total * len(values)"][0] == "hidden"


def test_what_a_check_prints_is_compared():
    told = fates(lab("print(mean([2, 4]))", "", "3.0\n"))
    assert told["return total / len(values) -> return total * len(values)"] == ("public", False, "prints '12\\n'")


def test_a_survivor_listed_as_equivalent_is_accepted(tmp_path):
    (tmp_path / "equivalent.txt").write_text("total = 0 -> total = 1  # nobody looks\n")
    known = mutate.read_equivalent(tmp_path / "equivalent.txt")
    told = fates(lab("mean([1])", "", ""), known)
    assert told["total = 0 -> total = 1"] == ("equivalent", False, "nobody looks")
    assert told["total = 0 -> total = -1"][0] == "survived"


@pytest.mark.parametrize("message, explained", [
    ("CheckFailed: divide by their number", True),
    ("RankError: rank 0 failed in cell line 4: my_block(x, 1)\nCheckFailed: x comes whole", True),
    ("RankError: rank 0 failed in cell line 7: dist.send(x, 4)\nValueError: there is no rank 4: ranks are 0 to 3",
     True),
    ("RankError: rank 0 failed in cell line 9: future.wait()\nbook.checks.CheckFailed: call each stage once", True),
    ("TypeError: mean() missing 1 required positional argument: 'group'", True),
    ("RankError: rank 0 failed in cell line 4: my_block(x, 1)\nIndexError: dimension out of range", False)])
def test_a_message_that_names_the_mistake_explains_it(message, explained):
    (mutant, *_) = mutants(MEAN)
    assert mutate.Outcome(1, mutant, "public", message).explained is explained


@pytest.mark.parametrize("check, at_answer", [
    ("mean(3)", True), ("len(mean([1]))", False), ("from book.launch import launch\nlaunch(mean, 2, 3)", True)])
def test_an_error_at_a_line_of_the_answer_is_told_from_one_in_the_labs_own_code(check, at_answer):
    (one, *_) = mutate.outcomes(lab(check, ""), 1, 0, {})
    assert (one.verdict, one.explained, one.at_answer) == ("public", False, at_answer)


def test_every_judged_mutant_still_exists():
    for name, notebook in LABS.items():
        path = ANSWERS / name / "equivalent.txt"
        keys = {one.key for exercise in points(notebook) for one in mutants(solution(notebook, exercise))}
        assert not path.exists() or mutate.read_equivalent(path).keys() <= keys


@pytest.mark.full
def test_an_infinite_loop_is_caught(monkeypatch):
    monkeypatch.setattr(mutate, "LIMIT_S", 1)
    told = fates(lab("while mean([3]) != 3:\n    pass", "", ""))
    assert told["total = 0 -> total = 1"] == ("public", False, "TimeoutError: not done after 1 s")


def test_a_line_without_a_reason_is_refused(tmp_path):
    (tmp_path / "equivalent.txt").write_text("total = 0 -> total = 1\n")
    with pytest.raises(LabError, match="a line must read 'before -> after  # reason'"):
        mutate.read_equivalent(tmp_path / "equivalent.txt")


def test_the_command_prints_each_outcome_and_a_table(tmp_path, capsys):
    nbformat.write(lab("mean([1])", "", ""), tmp_path / "lab.ipynb")
    assert main(["mutate", str(tmp_path / "lab.ipynb"), "-n", "100"]) == 1
    told = capsys.readouterr().out
    assert "exercise 1, one step, chunk or rank too many or too few: total = 0 -> total = 1\n    survived" in told
    assert told.splitlines()[-1].split()[0] == "all"
    nbformat.write(lab(), tmp_path / "lab.ipynb")
    assert main(["mutate", str(tmp_path / "lab.ipynb"), "-n", "100"]) == 0


def test_what_mutants_write_is_gone(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    nbformat.write(lab(f"open('left', 'w').close()\n{PUBLIC}"), "lab.ipynb")
    assert main(["mutate", "lab.ipynb", "-n", "100"]) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["lab.ipynb"] and Path.cwd() == tmp_path
