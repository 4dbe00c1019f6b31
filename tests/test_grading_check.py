"""How an answer is judged: by a student's own check, by a job in all its ends, by mutants and by lint."""
from __future__ import annotations

import ast
import json
import shutil
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient
from nbformat.v4 import new_code_cell, new_notebook, new_output

from book.grading import mutate
from book.grading.__main__ import main
from book.grading.grade import Grader, _killed, grade
from book.grading.handed_in import find
from book.grading.lab import LabError, marks, points
from book.grading.lab_schema import KEY
from book.grading.lint import faults
from book.grading.listening import ALL, SOME
from book.grading.mutations import MUTATIONS, mutants
from book.grading.release import released, with_outputs
from book.grading.run import PYTEST, loaded_at_start, run
from book.grading.sandbox import Limits
from book.grading.trial import solution
from book.launch.imports import LATER, may_need_later
from tests.answers import HERE as ANSWERS, LABS
from tests.attack_lab import BOUNDS, TOTAL, answered, attack_lab
from tests.once import once


WRONG = "def chunk_bounds(length, num_chunks):\n    return [(0, length)]\n"


@pytest.fixture(scope="module")
def source():
    text = once("attack_lab_with_outputs", lambda: nbformat.writes(with_outputs(attack_lab())))
    return nbformat.reads(text, as_version=4)


@pytest.fixture
def student(source, tmp_path, capsys):
    """A released lab, and a function that fills in answers and returns what both commands find."""
    nbformat.write(source, tmp_path / "source.ipynb")
    assert main(["release", str(tmp_path / "source.ipynb"), "-o", str(tmp_path / "mine")]) == 0
    copy = tmp_path / "mine" / "source.ipynb"

    def verdicts(run_all=False, **answers):
        notebook = answered(released(source), **answers)
        nbformat.write(notebook, copy)
        if run_all:  # as JupyterLab stores it: every cell run, errors and all
            notebook = nbformat.read(copy, as_version=4)
            NotebookClient(notebook, allow_errors=True, resources={"metadata": {"path": copy.parent}}).execute()
            nbformat.write(notebook, copy)
        plain = subprocess.run([sys.executable, "-c", PYTEST, "--nbval", "-q",
                                "-p", "no:cacheprovider", str(copy)], capture_output=True, text=True, cwd=tmp_path)
        capsys.readouterr()
        ours = main(["check", str(copy)])
        return plain.returncode, ours, "".join(capsys.readouterr())
    return verdicts


def exercise_2_alone():
    """The lab without its first exercise: half as long to run."""
    lab = attack_lab()
    lab.cells = [cell for cell in lab.cells if marks(cell).get("exercise") != 1]
    lab.metadata["lockstep"]["points"] = 1
    return lab


@pytest.mark.slow
def test_right_answers_pass_both_checks(student):
    plain, ours, told = student(bounds=BOUNDS, sent=TOTAL)
    assert (plain, ours) == (0, 0) and "3 of 3 points" in told


@pytest.mark.slow
def test_an_empty_copy_fails_both_checks(student):
    plain, ours, told = student()
    assert plain and ours and "0 of 3 points" in told and "exercise 1: 0 of 2 points: not answered" in told


@pytest.mark.slow
def test_a_wrong_answer_fails_both_even_when_its_outputs_are_saved(student):
    plain, ours, told = student(run_all=True, bounds=WRONG, sent=TOTAL)
    assert plain and ours and "1 of 3 points" in told and "the last chunk's length is" in told


@pytest.mark.slow
def test_a_missing_expected_file_is_asked_for(tmp_path, capsys):
    nbformat.write(attack_lab(), tmp_path / "alone.ipynb")
    assert main(["check", str(tmp_path / "alone.ipynb")]) == 1
    assert "alone.expected.json is not beside alone.ipynb" in capsys.readouterr().err


@pytest.mark.slow
def test_grading_is_retried_after_a_grader_error(tmp_path, monkeypatch):
    """Grading fails once; in the end only the grade is left."""
    attempt, faults = Grader.attempt, iter([OSError("gone")])

    def failing(*arguments):
        for fault in faults:
            raise fault
        return attempt(*arguments)

    monkeypatch.setattr(Grader, "attempt", failing)
    (tmp_path / "submissions").mkdir()
    nbformat.write(exercise_2_alone(), tmp_path / "lab.ipynb")
    nbformat.write(answered(exercise_2_alone()), tmp_path / "submissions" / "ada.ipynb")
    entries = find(tmp_path / "submissions", "lab.ipynb")
    (record,) = grade(tmp_path / "lab.ipynb", entries, tmp_path / "out", sandboxed=False)
    assert record["points"] == 1 and record["error"] is None and "fault" not in record
    assert json.loads((tmp_path / "out" / "private" / "ada.json").read_text()) == record


@pytest.mark.slow
def test_lint_finds_a_check_that_could_be_forged():
    """It finds nothing else, since the hidden check is fine."""
    lab = exercise_2_alone()
    cell = next(c for c in lab.cells if marks(c).get("id") == "check-2")
    cell.source = "assert ring_sent(8, 2) == 8\nprint(SEED % 8)"
    assert list(faults(lab)) == [
        "check check-2 prints the same with other seeds: print a number that depends on all of SEED"]


@pytest.mark.slow
def test_lint_finds_a_solution_that_fails():
    lab = exercise_2_alone()
    next(c for c in lab.cells if marks(c).get("id") == "sent").source = TOTAL.replace("2 *", "3 *")
    assert "own solution of exercise 2 does not pass" in " ".join(faults(lab))


WORDS = "Timeout of 3 seconds exceeded, Kernel died, Timed out, rank 1 was killed by SIGKILL"
LAUNCH = """import os, signal
import torch.distributed as dist
from book.launch import launch


def end():
    dist.init_process_group()
    {}


launch(end, 2)"""


def ended(*sources, cell_s=60):
    """How a job with these checks ends, each of which should print "right"."""
    checks = []
    for number, source in enumerate(sources, 1):
        mark = {KEY: {"id": f"check-{number}", "kind": "check", "exercise": 1}}
        outputs = [new_output("stream", name="stdout", text="right\n")]
        checks.append(new_code_cell(source, metadata=mark, outputs=outputs, execution_count=1))
    return run(new_notebook(cells=checks), Limits(cell_s=cell_s, wall_s=120), sandboxed=False)


@pytest.mark.slow
def test_words_alone_stop_no_job():
    result = ended(f"raise RuntimeError({WORDS!r})", f"print({WORDS!r})",
                   f"print('right')\nprint({WORDS!r}, file=__import__('sys').stderr)")
    assert result.why is None and _killed(result) is None
    assert [cell["stopped"] for cell in result.cells] == [False] * 3


@pytest.mark.slow
@pytest.mark.parametrize("source, cell_s, message", [
    ("import os\nos._exit(0)", 60, "the kernel died"), ("import time\ntime.sleep(60)", 3, "Timeout of 3 seconds")])
def test_a_kernel_that_ends_and_a_cell_that_takes_too_long_are_told_apart(source, cell_s, message):
    result = ended(source, cell_s=cell_s)
    assert result.why == "time limit of a cell, or the kernel died"
    assert result.cells[0]["message"].startswith(message)


@pytest.mark.slow
def test_a_folder_with_a_long_path_is_no_obstacle(tmp_path, monkeypatch):
    """There a socket would have no room for its name: neither the kernel's nor that of the ranks' server."""
    long = tmp_path / ("long" * 20)
    long.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(long))
    result = ended("import contextlib\nfrom book.launch import launch\nwith contextlib.redirect_stdout(None):\n"
                   "    run = launch(max, 2, 0, 1)\nprint('right' if list(run) == [1, 1] else 'wrong')")
    assert result.cells[0]["ok"], result.log


HANGS = ("import contextlib\nimport torch.distributed as dist\nfrom book.launch import launch\ndef waits():\n"
         "    dist.init_process_group()\n    rank = dist.get_rank()\n"
         + "".join(f"    if rank == {rank}:\n        dist.barrier()\n" for rank in range(6)))


@pytest.mark.slow
@pytest.mark.parametrize("source, first, num_lines", [
    (HANGS + "with contextlib.redirect_stdout(None):\n    launch(waits, 7, hang_s=1)",
     "check-1: HangError: the ranks wait for one another", 9),
    ("def f(n):\n    return f(n - 1) if n else 1 / 0\n" * 9 + "f(9)", "", 3)])
def test_a_student_sees_all_of_a_message_and_the_end_of_a_traceback(source, first, num_lines):
    told = ended(source).first_failure()
    assert told.startswith(first) and told.count("\n") == num_lines - 1
    assert ("cause: ranks 0-5 wait in barrier()" in told) == bool(first)


@pytest.mark.slow
@pytest.mark.parametrize("end, why", [("os.kill(os.getpid(), signal.SIGKILL)", "a rank was killed"),
                                      pytest.param(f"raise RuntimeError({WORDS!r})", None, marks=pytest.mark.slow)])
def test_a_rank_is_killed_if_its_exit_status_says_so(end, why):
    result = ended(LAUNCH.format(end))
    assert result.why is None and not result.cells[0]["ok"]
    assert _killed(result) == why


CHECK = """import sys
from book.launch import launch


def loaded():
    {}
    return "torch" in sys.modules, "torch._dynamo" in sys.modules


print(*launch(loaded, 2))"""


def notebook(source, printed=""):
    """A job with one check, which should print this."""
    mark = {KEY: {"id": "check-1", "kind": "check", "exercise": 1}}
    outputs = [new_output("stream", name="stdout", text=printed)]
    return new_notebook(cells=[new_code_cell(source, metadata=mark, outputs=outputs, execution_count=1)])


@pytest.mark.parametrize("source, loaded", [
    ("print(1)", ""), ("torch.optim.SGD", ""), ("from book.launch import launch", SOME),
    ("from book.launch import launch\ntorch.optim.SGD", ALL),
    ("from book.launch import launch\nfrom torch.nn.parallel import DistributedDataParallel", ALL)])
def test_a_notebook_has_loaded_what_its_code_may_use(source, loaded):
    assert loaded_at_start(notebook(source)) == loaded


@pytest.mark.parametrize("module", [name for name in LATER if name.startswith("torch")])
def test_an_import_of_a_later_module_is_noticed(module):
    assert may_need_later(f"import {module} as part")


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("bwrap") is None, reason="the sandbox needs bubblewrap")
@pytest.mark.parametrize("line, more", [("pass", False), ("pass  # no optimizer", True)])
def test_ranks_in_the_sandbox_find_it_loaded(line, more):
    printed = f"(True, {more}) (True, {more})\n"
    result = run(notebook(CHECK.format(line), f"2 ranks on gloo (CPU): no GPU here\n{printed}"))
    assert result.passed() == {"check-1"}, result


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


@pytest.mark.slow
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
    assert mutate.MutantOutcome(1, mutant, "public", message).explained is explained


@pytest.mark.parametrize("check, at_answer", [
    ("mean(3)", True), ("len(mean([1]))", False), ("from book.launch import launch\nlaunch(mean, 2, 3)", True)])
def test_an_error_at_a_line_of_the_answer_is_told_from_one_in_the_labs_own_code(check, at_answer):
    (one, *_) = mutate.outcomes(lab(check, ""), 1, 0, {})
    assert (one.verdict, one.explained, one.at_answer) == ("public", False, at_answer)


@pytest.mark.slow
def test_every_judged_mutant_still_exists():
    for name, notebook in LABS.items():
        path = ANSWERS / name / "equivalent.txt"
        keys = {one.key for exercise in points(notebook) for one in mutants(solution(notebook, exercise))}
        assert not path.exists() or mutate.read_equivalent(path).keys() <= keys


@pytest.mark.slow
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
