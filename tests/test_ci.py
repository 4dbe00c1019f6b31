"""What CI runs, and faults put into the package on purpose."""
from __future__ import annotations

import os
import re
import subprocess

import pytest
import yaml

from tests.mutants import __main__ as mutants
from tests.mutants.copies import ROOT

READS = [".ci/*", ".github/workflows/*.yml", ".github/actions/*/action.yml", "Makefile"]


WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


def read(path):
    return yaml.safe_load(path.read_text())


def steps(path):
    """(job, step) of each step of a workflow."""
    return [(job, step) for job in read(path)["jobs"].values() for step in job["steps"]]


def commands():
    """Each call of make in the workflows, in the first job of a matrix, and in .ci/run."""
    texts = [re.sub(r"\$\{\{.*?}}", "1", step["run"]) for path in WORKFLOWS for _, step in steps(path) if "run" in step]
    found = [line for text in texts for line in text.splitlines() if line.startswith("make ")]
    return sorted({*found, *re.findall(r'^ *step.* (make [\w-]+)', (ROOT / ".ci/run").read_text(), re.M)})


@pytest.mark.parametrize("command", commands())
def test_make_has_what_ci_calls(command):
    environment = {name: value for name, value in os.environ.items() if name != "MAKEFLAGS"}  # of `make -s test`
    shown = subprocess.run([*command.split(), "--dry-run"], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert shown.returncode == 0 and shown.stdout.strip(), shown.stderr


def test_the_scripts_of_ci_are_there_and_can_be_started():
    called = {step["run"] for path in WORKFLOWS for _, step in steps(path) if step.get("run", "").startswith(".ci/")}
    called |= {step["run"] for path in (ROOT / ".github/actions").glob("*/action.yml")
               for step in read(path)["runs"]["steps"] if "run" in step}
    assert called == {".ci/run", ".ci/install"}
    assert all(os.access(ROOT / name, os.X_OK) for name in called)


def test_the_shards_together_run_every_test():
    divided = [(job, step["run"]) for path in WORKFLOWS for job, step in steps(path) if "SHARD=" in step.get("run", "")]
    assert divided
    for job, command in divided:
        count = int(re.search(r"SHARD=\$\{\{ matrix\.shard }}/(\d+)", command)[1])
        assert job["strategy"]["matrix"]["shard"] == list(range(1, count + 1))


def test_publishing_waits_for_lint_and_website_alone():
    jobs = read(ROOT / ".github/workflows/ci.yml")["jobs"]
    assert jobs["publish"]["needs"] == "site" and "needs" not in jobs["site"]
    assert [step["run"] for step in jobs["site"]["steps"] if "run" in step] == ["make lint", "make site"]


def test_every_job_ends_and_has_no_more_rights_than_it_needs():
    for path in WORKFLOWS:
        workflow = read(path)
        assert workflow["permissions"] == {"contents": "read"}, path.name
        assert all(job["timeout-minutes"] for job in workflow["jobs"].values()), path.name
        rights = [name for name, job in workflow["jobs"].items() if "permissions" in job]
        assert rights == (["publish"] if path.name == "ci.yml" else [])


@pytest.mark.parametrize("ages_h, base", [((30, 20, 5, 1, 0), 1), ((20, 7, 0), 1), ((2, 1, 0), 1), ((0,), None)])
def test_a_push_is_compared_with_what_stood_before_it(tmp_path, ages_h, base):
    commits = [commit(tmp_path, age_h) for age_h in ages_h]
    assert base_of(tmp_path) == ("" if base is None else commits[base])


def test_a_branch_is_compared_with_the_commit_at_which_it_left_main(tmp_path):
    commits = [commit(tmp_path, age_h) for age_h in (30, 3, 2, 1)]
    git(tmp_path, "update-ref", "refs/remotes/origin/main", commits[1])
    assert base_of(tmp_path) == commits[1]


def git(folder, *arguments, **environment):
    command = ["git", "-C", str(folder), "-c", "user.name=-", "-c", "user.email=-", *arguments]
    return subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, check=True).stdout


def commit(folder, age_h):
    """Make an empty commit of some hours ago; returns its hash."""
    git(folder, "init", "-q")
    git(folder, "commit", "-q", "--allow-empty", "-m", "-", GIT_COMMITTER_DATE=f"@{1_700_000_000 - 3600 * age_h} +0000")
    return git(folder, "rev-parse", "HEAD").strip()


def base_of(folder):
    """What .ci/run compares with in this repository."""
    text = (ROOT / ".ci/run").read_text()
    parts = ["set -euo pipefail", *re.findall(r"^PUSHED_S=\d+|^base\(\) {\n(?:.*\n)*?}", text, re.M)]
    environment = {name: value for name, value in os.environ.items() if name != "GITHUB_BASE_REF"}
    return subprocess.run(["bash", "-c", "\n".join([*parts, "base"])], cwd=folder, env=environment, check=True,
                          capture_output=True, text=True).stdout.strip()


FAULT = "simulate_slow_sender"
PYTHON = "{python} -c 'import book.simulate.collective as module; "


@pytest.mark.slow
@pytest.mark.parametrize("patch", mutants.chosen([]), ids=lambda patch: patch.stem)
def test_a_patch_fits_and_is_headed_by_a_sentence(patch):
    head, blank, first, *_ = patch.read_text().splitlines()
    assert head.endswith(".") and not blank and first.startswith("--- a/book/")
    run = subprocess.run(["git", "apply", "--check", str(patch)], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, f"write it anew: {run.stderr}"


@pytest.mark.parametrize("status, printed, first", [
    (1, "F.\nFAILED tests/test_a.py::test_b[1-x] - assert 1 == 2\n1 failed\n", "tests/test_a.py::test_b[1-x]"),
    (1, "ERROR tests/test_a.py - ImportError: no\n", "tests/test_a.py"),
    (2, "make: *** [Makefile:1: quick] Error 2\n\n", "make: *** [Makefile:1: quick] Error 2"),
    (-9, "", "exit status -9"), (None, "", "not done after 5 s")])
def test_the_first_failed_test_is_reported(status, printed, first):
    assert mutants.first_failure(status, printed, 5) == first


@pytest.mark.full
@pytest.mark.parametrize("command, status, told", [
    (f"{PYTHON}assert \"np.maximum(self.slow\" in open(module.__file__).read()'", 0, "1 of 1 found: 1 by mine"),
    (f"{PYTHON}assert \"{ROOT}\" not in module.__file__'", 1, "0 of 1 found"),
    ("{python} -c 'raise SystemExit(3)'", 2, "the tests of mine fail without any fault")],
    ids=["found", "survives", "fails anyway"])
def test_a_fault_is_put_into_the_copy_only(command, status, told, capfd):
    assert mutants.main([FAULT, "--tier", "mine", "--command", command]) == status
    assert told in "".join(capfd.readouterr())


def test_a_mutant_that_cannot_be_tried_is_reported(capfd):
    for arguments in (["no_such_fault"], [FAULT, "--tier", "fast"]):
        assert mutants.main(arguments) == 2
    assert "no patch" in (said := capfd.readouterr().err) and "not fast" in said
