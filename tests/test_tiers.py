"""Which tests a run takes: by tier, by what a change affects, within a budget, by lot and by shard."""
from __future__ import annotations

import json
import re
import subprocess
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests import affected, costs, tiers
from tests.affected import EVERYTHING, FAR, changed_since, distances
from tests.once import once
from tests.website import ROOT

pytest_plugins = ["pytester"]
TESTS = """
import nbformat
import pytest
def test_cheap(): pass
@pytest.mark.slow
def test_slow(): pass
@pytest.mark.full
def test_full(): pass
@pytest.mark.parametrize("n", [0, pytest.param(1, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.full)])
def test_each(n): pass
@pytest.fixture
def browser(): pass
def test_page(browser): pass
"""
NAMES = {"quick": {"test_cheap", "test_each[0]"}, "pages": {"test_page"}, "none": set()}
NAMES["test"] = NAMES["quick"] | {"test_slow", "test_each[1]", "test_page"}
NAMES["all"] = NAMES["test"] | {"test_full", "test_each[2]"}


def taken(pytester: pytest.Pytester, *options: str, source: str = TESTS, file: str = "test_some.py") -> set[str]:
    """The names of the tests of `source` that a run with these options takes."""
    (pytester.path / file).parent.mkdir(exist_ok=True)
    (pytester.path / file).write_text(source)
    pytester.makeini("[pytest]\nmarkers =\n  slow\n  full")
    plugins = ("-p", "tests.tiers", "-p", "no:cacheprovider", "-p", "no:nbval")
    run = pytester.inline_run(*plugins, "--collect-only", *options)
    return {item.name for item in run.getcalls("pytest_collection_finish")[0].session.items}


@pytest.mark.parametrize("tier", NAMES)
def test_a_tier_takes_what_its_marks_say(pytester: pytest.Pytester, tier: str) -> None:
    assert taken(pytester, "--tier", tier) == NAMES[tier]


def test_a_test_that_takes_over_a_second_is_not_quick(pytester: pytest.Pytester, monkeypatch) -> None:
    monkeypatch.setattr(costs, "_kept", lambda: {"test_some.py": {"test_cheap": 1.1, "test_each": 0.1}})
    assert NAMES["quick"] - taken(pytester, "--tier", "quick") == {"test_cheap"}
    assert taken(pytester, "--tier", "test") == NAMES["test"]


def test_a_failure_is_named_at_once(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(test_some="def test_wrong():\n    assert 0\n\n\ndef test_right():\n    pass\n")
    printed = pytester.runpytest("-p", "tests.costs", "-p", "tests.tiers", "-q").stdout.str()
    assert printed.index("FAILED test_some.py::test_wrong") < printed.index("= FAILURES")


def test_a_sample_comes_from_beyond_the_tier_and_is_determined_by_the_seed(pytester: pytest.Pytester) -> None:
    options = ("--tier", "quick", "--add-drawn", "0.6", "--added-only", "--seed")
    drawn = [taken(pytester, *options, str(seed)) for seed in range(6)]
    assert all(len(names) == 3 and not names & NAMES["quick"] for names in drawn)
    assert drawn[0] == taken(pytester, *options, "0") and len({*map(frozenset, drawn)}) > 1


def test_what_one_run_of_the_grader_judges_is_drawn_together(pytester: pytest.Pytester) -> None:
    source = """
import pytest
@pytest.fixture(scope="module", params=["self", "nobody"])
def graded(request): pass
def test_points(graded): pass
def test_files(graded): pass
"""
    options = ("--import-mode=importlib", "--tier", "test", "--add-drawn", "0.5", "--seed")
    drawn = [taken(pytester, *options, str(seed), source=source,
                   file="tests/test_attacks_code.py") for seed in range(6)]
    assert {*map(frozenset, drawn)} == {frozenset({f"test_points[{user}]", f"test_files[{user}]"})
                                        for user in ("self", "nobody")}


def test_what_is_left_out_of_an_edited_file_is_named(pytester: pytest.Pytester, monkeypatch) -> None:
    monkeypatch.setattr(tiers, "changed_since", lambda revision: {"tests/test_some.py"})
    monkeypatch.setattr(tiers, "_distance", lambda item, near: 0)
    pytester.makepyfile(test_some=TESTS)
    pytester.makeini("[pytest]\nmarkers =\n  slow\n  full")
    for budget_s, words in (("2", ["left out, over the budget of 2 s: test_some.py (3 s)"]), ("9", [])):
        run = pytester.runpytest_inprocess("-p", "tests.tiers", "-p", "no:cacheprovider", "-p", "no:nbval",
                                           "--tier", "quick", "--add-affected", "HEAD", "--budget", budget_s)
        assert [line for line in run.outlines if line.startswith("left out")] == words


@pytest.mark.parametrize("kept, name, seconds", [
    ({"test_b": 0.1, "test_a": 4.0}, "test_a", 4.0), ({"test_b": 0.1, "test_b[x]": 4.0}, "test_b[y z]", 0.1),
    ({"test_a[1]": 4.0, "test_a[2]": 6.0, "test_b": 9.0}, "test_a[3]", 5.0),
    ({"Cell": 0.1, "Cell 7": 3.0}, "Cell 8", 0.1),
    ({"test_b": 9.0, "test_c": 1.0}, "test_a[3]", 5.0), (None, "test_a", costs.NEW_S)])
def test_a_test_that_was_not_measured_is_never_free(monkeypatch, kept, name: str, seconds: float) -> None:
    monkeypatch.setattr(costs, "_kept", lambda: {"file.py": kept} if kept else {})
    assert costs.of_id(f"file.py::{name}") == seconds


def test_a_function_that_was_never_measured_is_unknown(monkeypatch) -> None:
    monkeypatch.setattr(costs, "_kept", lambda: {"a.py": {"test_a[x]": 4.0}, "b.ipynb": {"Cell": 0.1}})
    ids = ["a.py::test_a[y]", "a.py::test_b[x]", "a.py::test_b[y]", "b.ipynb::Cell 3", "c.ipynb::Cell 0"]
    assert costs.unknown(ids) == {"a.py": 2, "c.ipynb": 1}


def test_what_a_run_did_not_measure_is_kept() -> None:
    kept = {"test_a": 0.1, "test_a[x]": 4.0, "test_a[y]": 2.0, "test_b": 0.2}
    measured = {"test_a[x]": 0.3, "test_a[z]": 0.1, "test_a[w]": 7.01, "test_c": 0.00001}
    assert costs.merged(kept, measured) == {
        "test_a": 0.2, "test_a[y]": 2.0, "test_a[w]": 7.0, "test_b": 0.2, "test_c": 0.001}


@pytest.mark.full
def test_a_run_adds_its_costs_and_says_which_are_missing(pytester: pytest.Pytester, monkeypatch) -> None:
    source = "import time\ndef test_old(): time.sleep(0.6)\ndef test_new(): pass"
    path = pytester.makepyfile(**{"tests/test_some": source})
    file = path.with_name("costs.json")
    file.write_text(json.dumps({"tests/test_some.py": {"test_gone": 9.0, "test_old": 9.0},
                                "tests/test_gone.py": {"test_x": 1.0}}))
    (path.parent / "conftest.py").write_text(f"from pathlib import Path\nfrom tests import costs\n"
                                             f"costs.FILE = Path({str(file)!r})\n")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    options = ("tests", "-p", "tests.tiers", "-p", "tests.costs", "-p", "no:cacheprovider", "-p", "no:nbval", "-n1")
    said = "tests/costs.json lacks 1 tests (tests/test_some.py 1): `make test-all COSTS=1` measures them"
    assert said in pytester.runpytest_subprocess(*options).outlines
    pytester.runpytest_subprocess(*options, "--write-costs")
    written = json.loads(file.read_text())
    assert [*written] == ["tests/test_some.py"] and [*written["tests/test_some.py"]] == ["test_new", "test_old"]
    assert 0.6 <= written["tests/test_some.py"]["test_old"] < 9


def test_shards_have_every_test_once(pytester: pytest.Pytester) -> None:
    parts = [taken(pytester, "--shard", f"{number}/2") for number in (1, 2)]
    assert parts[0] | parts[1] == NAMES["all"] and not parts[0] & parts[1]


@pytest.mark.full
def test_processes_that_share_a_run_start_with_the_longest_modules(pytester: pytest.Pytester, monkeypatch) -> None:
    pytester.makepyfile(**{f"test_{name}": "def test_a(): pass\ndef test_b(): pass" for name in ("few", "long", "mid")})
    pytester.makeconftest("from tests import costs\n"
                          "costs._kept = lambda: {f'test_{name}.py': {'test_a': seconds} for name, seconds in "
                          "(('few', 1.0), ('long', 9.0), ('mid', 4.0))}")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    options = ("-v", "-p", "tests.tiers", "-p", "no:cacheprovider", "-p", "no:nbval")
    for more, order in ((("-n1", "--dist=loadscope", "--no-loadscope-reorder"), ["long", "mid", "few"]),
                        (("-n0",), ["few", "long", "mid"])):
        run = pytester.runpytest_subprocess(*options, *more)
        passed = "\n".join(line for line in run.outlines if "PASSED" in line)
        assert re.findall(r"(\w+)\.py::test_([ab])\b", passed) == [(f"test_{n}", t) for n in order for t in "ab"]


@given(st.lists(st.tuples(st.integers(0, 8), st.floats(0, 50)), min_size=1, max_size=40), st.integers(1, 6))
def test_shards_are_of_about_equal_length_and_keep_modules_whole(tests: list[tuple[int, float]], count: int) -> None:
    units = [[SimpleNamespace(nodeid=f"m{module}::t{n}", seconds=s)] for n, (module, s) in enumerate(tests)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(costs, "_of_test", lambda item: item.seconds)
        parts = costs.shards(units, count)
        times = [sum(map(costs.of, part)) for part in parts]
        modules = [{unit[0].nodeid.split("::")[0] for unit in part} for part in parts]
        longest = max(sum(s for module, s in tests if module == which) for which in range(9))
    assert sorted(unit[0].nodeid for part in parts for unit in part) == sorted(unit[0].nodeid for unit in units)
    assert sum(map(len, modules)) == len(set().union(*modules))
    assert max(times) - min(times) <= longest + 1e-6


def test_a_changed_module_is_nearest_to_the_tests_that_import_it() -> None:
    near = distances(["book/simulate/collective.py"])
    assert near["book/simulate/collective.py"] == 0
    assert near["tests/test_simulate.py"] == 1 and near["chapters/03_ring_all_reduce.ipynb"] == 1
    assert near["labs/03_ring_all_reduce.ipynb"] > 1 and "tests/test_schedule.py" not in near


def test_an_import_is_followed_through_the_package_that_reexports_it() -> None:
    near = distances(["book/cost/links.py"])
    assert near["tests/test_simulate.py"] == 1 and "tests/test_wire.py" not in near
    assert affected._leads_to("book.cost", "Link") == {"book/cost/links.py"}


def test_a_script_affects_the_tests_of_its_widgets_alone() -> None:
    timeline, scene = distances(["book/widgets/timeline.js"]), distances(["book/widgets/scene.js"])
    assert timeline["tests/test_timeline_browser.py"] == 1 and "tests/test_mesh_browser.py" not in timeline
    assert scene["tests/test_mesh_browser.py"] == scene["tests/test_player_browser.py"] == 1
    assert distances(["book/widgets/memory_bars.js"])["tests/test_memory_browser.py"] == 1
    assert distances(["book/widgets/game.js"])["tests/test_pipeline_game.py"] == 1


def test_a_lab_affects_its_own_notebook_alone() -> None:
    near = distances(["labs/03_ring_all_reduce.ipynb"])
    assert near["labs/03_ring_all_reduce.ipynb"] == 0 and "labs/01_ranks.ipynb" not in near


@pytest.mark.parametrize("name", sorted(EVERYTHING))
def test_files_that_everything_depends_on_affect_every_test(name: str) -> None:
    assert (ROOT / name).is_file()
    assert distances([name])["tests/test_simulate.py"] in (1, FAR)


def test_every_pattern_of_files_that_a_test_reads_finds_some() -> None:
    lists = {name: list(affected._read(name)) for name in affected._sources()}
    assert not [path for paths in lists.values() for path in paths if not (ROOT / path).is_file()]
    for name in lists:
        text = (ROOT / name).read_text("utf-8")
        assert "\nREADS = " not in text or lists[name], f"READS of {name} finds no file"


def test_an_edited_file_and_a_new_one_are_changed(tmp_path, monkeypatch) -> None:
    git = ["git", "-c", "user.name=a", "-c", "user.email=b"]
    (tmp_path / "kept.py").write_text("1")
    (tmp_path / "edited.py").write_text("1")
    for command in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "first"]):
        subprocess.run([*git, *command], cwd=tmp_path, check=True)
    (tmp_path / "edited.py").write_text("2")
    (tmp_path / "new.py").write_text("1")
    monkeypatch.setattr(affected, "ROOT", tmp_path)
    assert changed_since("HEAD") == {"edited.py", "new.py"}


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
