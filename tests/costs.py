"""How long tests take, from costs.json: for choosing within a budget, and for shards that take about as long.

The file holds, for each test module or notebook, the seconds of its costly tests on one of two workers of a quiet
machine, and the mean of the others. `make costs` writes it after a whole run. `python -m tests.costs --shards N` prints
what each of N parts of `make test-all` is expected to take.
"""
from __future__ import annotations

import argparse
import json
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

FILE = Path(__file__).with_name("costs.json")
COSTLY_S = 0.5
NEW_S = 1.0  # a test of a file that was never measured
OTHERS = ""  # the key of the mean
NUM_WORKERS = 2


def of(unit: Iterable[pytest.Item]) -> float:
    """The seconds that these tests are expected to take, one after the other."""
    return sum(map(_of_test, unit))


def of_id(nodeid: str) -> float:
    """The seconds that the test of this id is expected to take."""
    file, name = _key(nodeid)
    costs = _kept().get(file, {OTHERS: NEW_S})
    if name in costs:
        return costs[name]
    if costs.get(OTHERS):
        return costs[OTHERS]
    # All tests that were measured are costly, so this is a new one: as costly as those of the same function.
    alike = [seconds for other, seconds in costs.items() if other and other.split("[")[0] == name.split("[")[0]]
    return sum(alike) / len(alike) if alike else NEW_S


def shards(units: list[list[pytest.Item]], count: int) -> list[list[list[pytest.Item]]]:
    """Divide tests into parts that take about as long: the longest class or module first, each to the shortest part."""
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
def _kept() -> dict[str, dict[str, float]]:
    return json.loads(FILE.read_text("utf-8")) if FILE.exists() else {}


def _of_test(item: pytest.Item) -> float:
    return of_id(item.nodeid)


def _key(nodeid: str) -> tuple[str, str]:
    file, _, name = nodeid.partition("::")
    return file, name


class Writer:
    """A pytest plugin that adds up how long each test takes, and writes costs.json when the run has ended."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Add a phase of a test."""
        self._seconds[report.nodeid] = self._seconds.get(report.nodeid, 0.0) + report.duration

    def pytest_sessionfinish(self) -> None:
        """Replace what is kept of the files that this run had tests of."""
        files: dict[str, dict[str, float]] = {}
        for nodeid, seconds in self._seconds.items():
            file, name = _key(nodeid)
            files.setdefault(file, {})[name] = seconds
        kept = _kept() | {file: _summary(tests) for file, tests in files.items()}
        FILE.write_text(json.dumps(dict(sorted(kept.items())), indent=1, ensure_ascii=False) + "\n", "utf-8")


def _summary(seconds: dict[str, float]) -> dict[str, float]:
    costly = {name: round(s, 1) for name, s in sorted(seconds.items()) if s >= COSTLY_S}
    others = [s for s in seconds.values() if s < COSTLY_S]
    return {OTHERS: round(sum(others) / len(others), 3) if others else 0.0} | costly


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option that measures."""
    parser.addoption("--write-costs", action="store_true", help="keep how long the tests took, in tests/costs.json")


def pytest_configure(config: pytest.Config) -> None:
    """Measure where it is asked for; xdist's workers report to the process that started them."""
    if config.getoption("write_costs") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Writer())


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
