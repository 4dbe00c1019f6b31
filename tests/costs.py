"""How long tests take, from costs.json: for choosing within a budget, and for shards of about equal length.

The file holds, for each test module or notebook, the seconds of its costly tests on one of two workers of a quiet
machine, and of each test function the mean of its others. `make test-all COSTS=1` adds what it measured. A run on
several workers ends with a line about tests that are not in the file. `python -m tests.costs --shards N` prints what
each of N parts of `make test-all` is expected to take.
"""
from __future__ import annotations

import argparse
import json
import os
import re
from collections import Counter
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

FILE = Path(__file__).with_name("costs.json")
COSTLY_S = 0.5
NEW_S = 1.0  # a test of a file that was never measured
NUM_WORKERS = 2
UNKNOWN = pytest.StashKey[dict[str, int]]()
Costs = dict[str, dict[str, float]]


def of(unit: Iterable[pytest.Item]) -> float:
    """The seconds that these tests are expected to take, one after the other."""
    return sum(map(_of_test, unit))


def of_id(nodeid: str) -> float:
    """The seconds that the test of this id is expected to take."""
    file, name = _key(nodeid)
    costs = _kept().get(file, {})
    # A new test costs as much as those of the same function, a new function as those of the same file.
    alike = [seconds for other, seconds in costs.items() if _function(other) == _function(name)]
    return costs.get(name) or costs.get(_function(name)) or _mean(alike) or _mean(costs.values()) or NEW_S


def unknown(nodeids: Iterable[str]) -> dict[str, int]:
    """How many tests of each file are of functions that were never measured, or of a notebook that never was."""
    known = {(file, _function(name)) for file, costs in _kept().items() for name in costs}
    keys = [_key(nodeid) for nodeid in nodeids]
    return dict(Counter(file for file, name in keys if (file, _function(name)) not in known))


def shards(units: list[list[pytest.Item]], count: int) -> list[list[list[pytest.Item]]]:
    """Divide tests into parts of about equal length: the longest class or module first, each to the shortest part."""
    parts: list[list[list[pytest.Item]]] = [[] for _ in range(count)]
    times_s = [0.0] * count
    for scope in longest_first(units):
        shortest = times_s.index(min(times_s))
        parts[shortest] += scope
        times_s[shortest] += sum(map(of, scope))
    return parts


def longest_first(units: list[list[pytest.Item]]) -> list[list[list[pytest.Item]]]:
    """The tests of each class or module, those that take the longest first."""
    scopes: dict[str, list[list[pytest.Item]]] = {}
    for unit in units:
        scopes.setdefault(unit[0].nodeid.rsplit("::", 1)[0], []).append(unit)
    return sorted(scopes.values(), key=lambda scope: -sum(map(of, scope)))


@cache
def _kept() -> Costs:
    return json.loads(FILE.read_text("utf-8")) if FILE.exists() else {}


def _of_test(item: pytest.Item) -> float:
    return of_id(item.nodeid)


def _key(nodeid: str) -> tuple[str, str]:
    file, _, name = nodeid.partition("::")
    return file, name


def _function(name: str) -> str:
    """A test's name without its parameters; "Cell" for each cell of a notebook."""
    return re.split(r"[\[ ]", name)[0]


def _mean(seconds: Iterable[float]) -> float:
    return sum(listed) / len(listed) if (listed := list(seconds)) else 0.0


class Writer:
    """A pytest plugin that adds up how long each test takes, and when the run has ended adds it to costs.json.

    `scale` is what a second counts: less than 1 where more workers than cores took turns.
    """

    def __init__(self, scale: float = 1.0) -> None:
        self._scale = scale
        self._seconds: dict[str, float] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Add a phase of a test."""
        self._seconds[report.nodeid] = self._seconds.get(report.nodeid, 0.0) + report.duration * self._scale

    def pytest_sessionfinish(self) -> None:
        """Replace what is kept of the tests that ran, and leave out functions that are gone."""
        files: Costs = {}
        for nodeid, seconds in self._seconds.items():
            file, name = _key(nodeid)
            files.setdefault(file, {})[name] = seconds
        kept = _kept() | {file: merged(_kept().get(file, {}), tests) for file, tests in files.items()}
        there = {file: _there(file, costs) for file, costs in sorted(kept.items())}
        FILE.write_text(json.dumps({file: costs for file, costs in there.items() if costs}, indent=1,
                                   ensure_ascii=False) + "\n", "utf-8")


def merged(kept: dict[str, float], measured: dict[str, float]) -> dict[str, float]:
    """What to keep of a file: measured tests as measured, the others as they were."""
    cheap: dict[str, list[float]] = {}
    for name, seconds in measured.items():
        if seconds < COSTLY_S:
            cheap.setdefault(_function(name), []).append(seconds)
    costly = {name: round(seconds, 1) for name, seconds in measured.items() if seconds >= COSTLY_S}
    others = {name: seconds for name, seconds in kept.items() if name not in measured}
    means = {name: max(round(_mean(seconds), 3), 0.001) for name, seconds in cheap.items()}
    return dict(sorted({**others, **means, **costly}.items()))


def _there(file: str, costs: dict[str, float]) -> dict[str, float]:
    """The entries of a file whose functions it still has."""
    path = FILE.parents[1] / file
    text = path.read_text("utf-8") if path.exists() else ""
    return {name: seconds for name, seconds in costs.items()
            if f"def {_function(name).rpartition('::')[2]}(" in text or (text and path.suffix == ".ipynb")}


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option that measures."""
    parser.addoption("--write-costs", action="store_true", help="add how long the tests took to tests/costs.json")


def pytest_configure(config: pytest.Config) -> None:
    """Measure where it is asked for; xdist's workers report to the process that started them."""
    if config.getoption("write_costs") and not hasattr(config, "workerinput"):
        workers = getattr(config.option, "numprocesses", None) or 1
        config.pluginmanager.register(Writer(min(1.0, (os.cpu_count() or 1) / workers)))


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep, before any is left out, how many tests were never measured."""
    config.stash[UNKNOWN] = unknown(item.nodeid for item in items)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Tell xdist's controller: each worker collects the same."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["unknown"] = session.config.stash.get(UNKNOWN, {})


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Keep what a worker tells."""
    node.config.stash[UNKNOWN] = getattr(node, "workeroutput", {}).get("unknown", {})


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Say after a run on several workers how many tests are missing, and where most of them are."""
    found = config.stash.get(UNKNOWN, {})
    if found and getattr(config.option, "numprocesses", None) and not config.option.write_costs:
        most = ", ".join(f"{file} {count}" for file, count in Counter(found).most_common(5))
        more = f" and {len(found) - 5} more files" if len(found) > 5 else ""
        terminalreporter.write_line(f"tests/costs.json lacks {sum(found.values())} tests ({most}{more}): "
                                    "`make test-all COSTS=1` measures them")


class _Collected:
    def __init__(self) -> None:
        self.items: list[pytest.Item] = []

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self.items = session.items


def main() -> None:
    """Print the estimate of each part of `make test-all`."""
    parser = argparse.ArgumentParser(prog="python -m tests.costs", description=main.__doc__)
    parser.add_argument("--shards", type=int, default=1, metavar="N")
    count: int = parser.parse_args().shards
    for number in range(1, count + 1):
        collected = _Collected()
        command: list[Any] = ["tests", "chapters", "labs", "--nbval", "--collect-only", "-qq", "--shard",
                              f"{number}/{count}"]
        pytest.main(command, plugins=[collected])
        minutes = of(collected.items) / NUM_WORKERS / 60
        print(f"shard {number} of {count}: {len(collected.items)} tests, "
              f"about {minutes:.1f} min on {NUM_WORKERS} workers")


if __name__ == "__main__":
    main()
