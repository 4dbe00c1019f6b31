"""How the suite is run: which tests a mark takes, what begins first, what a slow day leaves out; CI; kernels.

And the browser that tests share: what it keeps of a page that goes wrong, and that a reused page starts clean.
"""
from __future__ import annotations

import asyncio
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import nbformat
import psutil
import pytest
import yaml
from nbformat.v4 import new_code_cell, new_notebook, new_output

from book.authoring.normalise import KERNELSPEC
from book.grading.trial import solution
from tests import suite
from tests.answers import LABS
from tests.browser import Browser
from tests.busy import busy, verdict
from tests.kernels import CAN_FORK
from tests.once import once
from tests.stress import survivors
from tests.website import ROOT


pytest_plugins = ["pytester"]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
TESTS = """
import pytest
def test_cheap(): pass
@pytest.mark.slow
def test_slow(): pass
@pytest.fixture
def browser(): pass
def test_page(browser): pass
"""


@pytest.fixture
def run(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs pytest with the plugin and these options in a folder of its own; what it remembers is there too."""
    for name in ("LEFT_OUT", "FAILED"):
        monkeypatch.setattr(suite, name, pytester.path / "_build" / name.lower())
    monkeypatch.delenv(suite.BEGIN_UNTIL, raising=False)
    pytester.makeini("[pytest]\nmarkers =\n  slow\n  browser")
    plugins = ("-p", "tests.suite", "-p", "no:cacheprovider", "-p", "no:nbval")
    return lambda *options: pytester.inline_run(*plugins, *options)


def order(ran: Any) -> list[str]:
    return [item.nodeid for item in ran.getcalls("pytest_collection_finish")[0].session.items]


@pytest.mark.parametrize("expression, names", [
    ("not slow and not browser", {"test_cheap"}), ("not slow", {"test_cheap", "test_page"}),
    ("browser", {"test_page"})])
def test_marks_choose_and_a_page_has_its_own(pytester: pytest.Pytester, run: Any, expression: str,
                                             names: set[str]) -> None:
    pytester.makepyfile(test_some=TESTS)
    assert {nodeid.partition("::")[2] for nodeid in order(run("-m", expression))} == names


def test_slow_modules_begin_first_the_longest_before_the_others(pytester: pytest.Pytester, run: Any) -> None:
    slow = "import pytest\npytestmark = pytest.mark.slow\ndef test_one(): pass\n"
    pytester.makepyfile(test_a=TESTS, test_b=slow, test_c=slow + "def test_two(): pass\n")
    assert [re.split("[._]", nodeid)[1] for nodeid in order(run())] == ["c", "c", "b", "a", "a", "a"]


def test_a_notebook_is_skipped_where_its_package_is_missing(pytester: pytest.Pytester, run: Any,
                                                            monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suite, "NEEDS", {"test_a.py": "no_such_package", "test_b.py": "pytest"})
    pytester.makepyfile(test_a="def test_one(): pass\n", test_b="def test_two(): pass\n")
    passed, skipped, failed = run().listoutcomes()
    assert [report.nodeid for report in passed] == ["test_b.py::test_two"] and not failed
    assert [report.nodeid for report in skipped] == ["test_a.py::test_one"]
    assert "no_such_package is not installed: python -m pip install -r" in str(skipped[0].longrepr)
    assert all((ROOT / "chapters" / name).is_file() for name in ("89_quorum.ipynb",))


def test_what_begins_too_late_is_skipped_named_and_first_the_next_time(pytester: pytest.Pytester, run: Any,
                                                                       monkeypatch: pytest.MonkeyPatch,
                                                                       capsys: pytest.CaptureFixture[str]) -> None:
    """The clock runs out while the first module is at its first test: that module ends, the others do not begin."""
    monkeypatch.setenv(suite.BEGIN_UNTIL, "10")
    times = iter([0.0] + [99.0] * 9)
    monkeypatch.setattr(suite, "time", SimpleNamespace(time=lambda: next(times, 99.0)))  # no other thread's
    test = "def test_one(): pass\ndef test_two(): pass\n"
    pytester.makepyfile(test_a=test, test_b=test, test_c=test)
    passed, skipped, failed = run().listoutcomes()
    assert (len(passed), len(skipped), len(failed)) == (2, 4, 0)
    said = capsys.readouterr().out
    assert f"{suite.WHY}: test_b.py" in said and f"{suite.WHY}: test_c.py" in said
    monkeypatch.delenv(suite.BEGIN_UNTIL)
    assert [nodeid[:6] for nodeid in order(run())][::2] == ["test_b", "test_c", "test_a"]
    assert suite.left_out() == [], "all have run since"


def test_what_has_waited_longest_is_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suite, "LEFT_OUT", tmp_path / "left_out")
    suite.remember([], late=["b", "c"], done=[])
    suite.remember(suite.left_out(), late=["a"], done=["b"])
    assert suite.left_out() == ["c", "a"]


def test_a_failure_is_named_at_once_and_can_be_run_alone(pytester: pytest.Pytester, run: Any,
                                                         capsys: pytest.CaptureFixture[str]) -> None:
    pytester.makepyfile(test_some="import pytest\n\n@pytest.mark.parametrize('x', ['a b', 'a::b [1] - c', 'd'])\n"
                                  "def test_one(x):\n    assert x == 'd'\n")
    run("-q")
    printed = capsys.readouterr().out
    assert printed.index("FAILED test_some.py::test_one[a b]") < printed.index("= FAILURES")
    wrong = ["test_some.py::test_one[a b]", "test_some.py::test_one[a::b [1] - c]"]
    assert suite.FAILED.read_text().splitlines() == wrong
    assert order(run("-q", f"@{suite.FAILED}")) == wrong
    pytester.makepyfile(test_some="def test_right(): pass\n")
    run("-q")
    assert not suite.FAILED.exists()


def test_a_value_made_once_is_shared_and_a_failure_is_retried() -> None:
    made = iter([RuntimeError("no"), [1, 2]])

    def make() -> list[int]:
        value = next(made)
        if isinstance(value, Exception):
            raise value
        return value

    with pytest.raises(RuntimeError):
        once("test-of-once", make)
    assert once("test-of-once", make) == once("test-of-once", make) == [1, 2]


def test_pytest_imports_no_grammar_that_takes_seconds() -> None:
    """See `without_iri_grammar`: pytest loads nbval, which would import it, before any conftest."""
    assert sys.modules["rfc3987_syntax"] is None


def read(path: Path) -> Any:
    return yaml.safe_load(path.read_text())


def runs() -> Iterator[str]:
    """What the workflows, their action and .ci/run call."""
    jobs = [job for path in WORKFLOWS for job in read(path)["jobs"].values()]
    jobs += [read(path)["runs"] for path in (ROOT / ".github" / "actions").glob("*/action.yml")]
    for job in jobs:
        yield from (line for step in job["steps"] for line in step.get("run", "").splitlines())
    yield from re.findall(r"^step (make [\w-]+)", (ROOT / ".ci/run").read_text(), re.M)


@pytest.mark.parametrize("command", sorted({line for line in runs() if line.startswith("make ")}))
def test_make_has_what_ci_calls(command: str) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "MAKEFLAGS"}  # of `make -s test`
    shown = subprocess.run([*command.split(), "--dry-run"], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert shown.returncode == 0 and shown.stdout.strip(), shown.stderr


def test_the_scripts_of_ci_are_there_and_can_be_started() -> None:
    called = {line for line in runs() if line.startswith(".ci/")}
    assert called == {".ci/run", ".ci/install"}
    assert all(os.access(ROOT / name, os.X_OK) for name in called)


FAKE_MAKE = """#!/bin/sh
echo "make $*" >> calls
case "$*" in
  check) exit 0;;
  test-all) mkdir -p _build
    printf 'chapters/02.ipynb\ntests/test_a.py::TestLab::test_x[a b]\n%b' "$MORE" > _build/failed
    echo '= 2 failed, 9 passed in 2.0s ='; echo "make: *** [Makefile:75: test-all] Error ${ENDED:-1}"; exit 2;;
  *) cat "${3#TESTS=@}" >> calls; rm -f _build/failed; echo '= 3 passed in 2.0s ='; exit ${LATER:-0};;
esac
"""
MANY = "".join(f"tests/test_{letter}.py::test_x\\n" for letter in "bc")
AGAIN = "chapters/02.ipynb\ntests/test_a.py::TestLab::test_x[a b]\n"


@pytest.mark.parametrize("env, status, num_calls", [
    ({}, 0, 4), ({"LATER": "1"}, 1, 3), ({"ENDED": "2"}, 1, 2), ({"MORE": MANY}, 1, 2)],
    ids=["pass alone", "fail alone", "interrupted", "many modules"])
def test_what_fails_beside_others_is_run_again_alone_and_twice(tmp_path: Path, env: dict[str, str], status: int,
                                                               num_calls: int) -> None:
    (tmp_path / ".ci").mkdir()
    for name in ("run", "present.sh"):
        shutil.copy(ROOT / ".ci" / name, tmp_path / ".ci" / name)
    for path, text in ((".ci/install", "#!/bin/sh\n"), ("bin/make", FAKE_MAKE)):
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_text(text)
        (tmp_path / path).chmod(0o755)
    ended = subprocess.run([".ci/run"], cwd=tmp_path, capture_output=True, text=True, env={
        **os.environ, "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", **env})
    calls = (tmp_path / "calls").read_text()
    assert (ended.returncode, calls.count("make ")) == (status, num_calls), ended.stdout
    assert calls.count("JOBS=0 TESTS=@") == calls.count(AGAIN) == num_calls - 2
    assert num_calls == 2 or f"== Run again, alone and twice:\n{AGAIN}" in ended.stdout


def test_publishing_waits_for_the_website_alone() -> None:
    jobs = read(ROOT / ".github/workflows/ci.yml")["jobs"]
    assert jobs["publish"]["needs"] == "site" and "needs" not in jobs["site"]
    assert [step["run"] for step in jobs["site"]["steps"] if "run" in step] == ["make site"]


def test_every_job_ends_and_has_no_more_rights_than_it_needs() -> None:
    for path in WORKFLOWS:
        workflow = read(path)
        assert workflow["permissions"] == {"contents": "read"}, path.name
        assert all(job["timeout-minutes"] for job in workflow["jobs"].values()), path.name
        rights = [name for name, job in workflow["jobs"].items() if "permissions" in job]
        assert rights == (["publish"] if path.name == "ci.yml" else [])


# Kernels: a forked one is like a fresh one, none outlives its run, and labs pass beside busy loops
CELLS = {
    "import os\nprint(os.getcwd() == FOLDER, __name__, 'torch' in globals())": "True __main__ False\n",
    "import beside\nprint(beside.NAME)": "a module beside the notebook\n",
    "print(os.getpid(), file=open('pid', 'w'))": None,
    "from book.launch import launch\n\ndef rank():\n    import os\n    return os.environ['RANK']\n\n"
    "run = launch(rank, 2)\nprint(list(run))": "2 ranks on gloo (CPU): no GPU here\n['0', '1']\n",
    "import signal\nprint(signal.getsignal(signal.SIGINT) is not signal.SIG_IGN)": "True\n",
}


def nbval(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "-c", ROOT / "pyproject.toml", "--rootdir", ROOT, "--nbval", "-q",
               *options, "-p", "conftest", folder / "a.ipynb"]
    return subprocess.run(list(map(str, command)), cwd=ROOT, text=True, capture_output=True, timeout=240)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a notebook whose outputs are those of a fresh kernel, and a module that it imports."""
    cells = []
    for number, (source, text) in enumerate(CELLS.items(), 1):
        outputs = [new_output("stream", name="stdout", text=text)] if text else []
        source = source.replace("FOLDER", repr(str(tmp_path)))
        cells.append(new_code_cell(source, execution_count=number, outputs=outputs))
    nbformat.write(new_notebook(cells=cells, metadata={"kernelspec": KERNELSPEC}), tmp_path / "a.ipynb")
    (tmp_path / "beside.py").write_text("NAME = 'a module beside the notebook'\n")
    return tmp_path


@pytest.mark.slow
@pytest.mark.skipif(not CAN_FORK, reason='kernels are forked on Linux')
@pytest.mark.parametrize("options", [(), ("--fresh-kernels",)], ids=["forked", "fresh"])
def test_a_forked_kernel_looks_like_a_fresh_one(folder: Path, options: tuple[str, ...]) -> None:
    run = nbval(folder, *options)
    assert run.returncode == 0, run.stdout
    assert not psutil.pid_exists(int((folder / "pid").read_text())), "the kernel has ended with the run"


@pytest.mark.skipif(not CAN_FORK, reason='kernels are forked on Linux')
@pytest.mark.slow
def test_an_output_that_differs_fails_in_a_forked_kernel_too(folder: Path) -> None:
    path = folder / "beside.py"
    path.write_text("NAME = 'another one'\n")
    run = nbval(folder)
    assert run.returncode == 1 and "1 failed, 4 passed" in run.stdout, run.stdout


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != 'linux', reason='reads /proc')
def test_nothing_is_left_of_killed_and_restarted_kernels_and_interrupted_launches():
    left = survivors(times=1, seed=7)
    assert left == {"killed kernels": [0], "restarted kernels": [0], "interrupted launches": [0]}


LAB = LABS["01_ranks"]


@pytest.mark.slow
def test_a_solution_passes_beside_busy_loops_and_a_wrong_answer_does_not():
    right = solution(LAB, 1)
    with busy(2):
        assert verdict(LAB, 1, right) is None
        assert "CheckFailed" in verdict(LAB, 1, right.replace("dist.send(buffer,", "dist.send(buffer + 1,"))


ASKS = """<!doctype html><html lang="en"><title>t</title><body><p>x</p><img src="gone.png">
<img src="http://192.0.2.1/address.png"><img src="https://example.com/name.png"><script>
console.error("said"); new WebSocket("ws://example.com/socket"); setTimeout(() => { throw new Error("thrown") })
</script>"""
STATE = """() => [innerWidth, matchMedia('(prefers-color-scheme: dark)').matches,
  matchMedia('(prefers-reduced-motion: reduce)').matches, matchMedia('print').matches, 'left' in window,
  document.querySelector('p').matches(':hover')]"""


@pytest.fixture
def wrong(tmp_path: Path) -> str:
    """The address of a page on which everything goes wrong that can."""
    page = tmp_path / "wrong.html"
    page.write_text(ASKS, "utf-8")
    return page.as_uri()


def test_errors_are_collected_and_no_request_leaves_the_machine(browser: Browser, wrong: str) -> None:
    page, log = browser.open(wrong)
    page.wait_for_function("[...document.images].every(image => image.complete)")
    assert sorted(log.outside) == ["http://192.0.2.1/address.png", "https://example.com/name.png",
                                   "ws://example.com/socket"]
    assert any("gone.png" in text for text in log.failed)
    assert all(f"{name}.png (net::ERR_NAME_NOT_RESOLVED)" in str(log) for name in ("address", "name"))
    assert "said" in log.errors and "uncaught: thrown" in log.errors
    with pytest.raises(AssertionError, match="outside request"):
        log.assert_clean()


def test_a_reused_page_starts_clean(browser: Browser, wrong: str) -> None:
    page, _ = browser.open(wrong, width=500, color_scheme="dark", reduced_motion="reduce")
    other, _ = browser.open(wrong)
    assert other != page and page.evaluate(STATE) == [500, True, True, False, False, False]
    page.evaluate("window.left = 1")
    page.locator("p").hover()
    page.mouse.down()
    page.emulate_media(media="print")
    browser.take_back()
    for _ in range(2):
        again, log = browser.open("about:blank")
        again.set_content("<p>x</p>")
        assert again in (page, other) and again.evaluate(STATE) == [1200, False, False, False, False, False]
        log.assert_clean()


@pytest.mark.slow
def test_other_event_loops_run_only_while_no_test_uses_the_browser(chromium: Browser, wrong: str) -> None:
    """As jupyter_client's do, in a notebook's cells between two browser tests."""
    assert asyncio.run(asyncio.sleep(0, "ran")) == "ran"
    with chromium.awake():
        assert chromium.open(wrong)[0].inner_text("p") == "x"
        chromium.take_back()
    assert asyncio.run(asyncio.sleep(0, "ran again")) == "ran again"
