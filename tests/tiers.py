"""A pytest plugin: which tests a run takes, by tier, by what a change affects, by lot, by shard.

    quick   tests without a mark that take at most a second by tests/costs.json
    test    those marked `slow` as well, and every notebook
    all     those marked `full` as well

A test that asks for a browser or for the website is slow, one that attacks or grades is full; neither needs the mark.
`--add-affected` and `--add-drawn` add to a tier from what lies beyond it. With xdist each worker chooses for itself, so
that the choice has to follow from the command line and the files alone.
"""
from __future__ import annotations

import random
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from tests import costs
from tests.affected import ROOT, changed_since, distances

TIERS = {"none": 0, "quick": 1, "test": 2, "all": 3}
LEFT_OUT = pytest.StashKey[list[str]]()
WITH_PAGES = {"browser", "site", "site_url", "bare_site"}
QUICK_S = 1.0
ALWAYS_FULL = re.compile(r"tests/test_(attacks_\w+|grading_labs)\.py")
ONE_RUN = re.compile(r"tests/test_attacks_(code|files)\.py")  # any of their tests costs as much as all


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options that choose tests."""
    group = parser.getgroup("tiers")
    group.addoption("--tier", choices=[*TIERS, "pages"], default="all",
                    help="take the tests of this tier (default: all); pages: all that need a browser or the website")
    group.addoption("--add-affected", metavar="REVISION", help="add tests that files changed since then affect")
    group.addoption("--budget", type=float, default=float("inf"), metavar="SECONDS",
                    help="add affected tests, nearest first, up to this estimate")
    group.addoption("--add-drawn", type=float, default=0.0, metavar="SHARE", help="add this share of the others")
    group.addoption("--seed", type=int, default=0, help="of --add-drawn")
    group.addoption("--added-only", action="store_true", help="leave the tier itself out")
    group.addoption("--shard", metavar="I/N", help="take the I-th of N parts that take about as long")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep what the options ask for, and report the rest as deselected."""
    chosen = _added(config, [item for item in items if not _in_tier(item, config.option.tier)])
    if not config.option.added_only:
        chosen += _units(item for item in items if _in_tier(item, config.option.tier))
    if config.option.shard:
        number, count = map(int, config.option.shard.split("/"))
        chosen = costs.shards(chosen, count)[number - 1]
    kept = {id(item) for unit in chosen for item in unit}
    config.hook.pytest_deselected(items=[item for item in items if id(item) not in kept])
    items[:] = [item for item in items if id(item) in kept]
    if hasattr(config, "workerinput"):  # one of several processes: none should start a long module when the others end
        items[:] = [item for scope in costs.longest_first(_units(items)) for unit in scope for item in unit]


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Tell xdist's controller what this worker has left out: each chooses the same."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["left_out"] = session.config.stash.get(LEFT_OUT, [])


class Failures:
    """Names a test as soon as it has failed: pytest does so at the end of the run, which may be minutes away."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Write the name of a failed test."""
        terminal = self._config.pluginmanager.get_plugin("terminalreporter")
        if report.failed and terminal is not None and self._config.get_verbosity() <= 0:
            terminal.write_line(f"\nFAILED {report.nodeid}", red=True)


def pytest_configure(config: pytest.Config) -> None:
    """Name failures in the process that writes to the terminal; xdist's workers report to it."""
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Failures(config))


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Keep what a worker tells."""
    node.config.stash[LEFT_OUT] = getattr(node, "workeroutput", {}).get("left_out", [])


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Say which tests a change is nearest to, and were too costly for the budget."""
    for words in config.stash.get(LEFT_OUT, []):
        terminalreporter.write_line(f"left out, over the budget of {config.option.budget:g} s: {words}")


def _added(config: pytest.Config, others: list[pytest.Item]) -> list[list[pytest.Item]]:
    """What the options add to the tier from the other tests."""
    option, units = config.option, _units(others)
    added, left_out = _affected(units, option.add_affected, option.budget) if option.add_affected else ([], [])
    config.stash[LEFT_OUT] = left_out
    drawn = random.Random(option.seed).sample(units, round(option.add_drawn * len(units)))
    return added + [unit for unit in drawn if unit not in added]


def _in_tier(item: pytest.Item, tier: str) -> bool:
    return needs_pages(item) if tier == "pages" else level(item) <= TIERS[tier]


def level(item: pytest.Item) -> int:
    """The lowest tier that has this test: 1 quick, 2 test, 3 all."""
    if item.get_closest_marker("full") or ALWAYS_FULL.match(item.nodeid):
        return 3
    slow = (item.get_closest_marker("slow") or is_cell(item) or needs_pages(item)
            or costs.of_id(item.nodeid) > QUICK_S)
    return 2 if slow else 1


def needs_pages(item: pytest.Item) -> bool:
    """Whether a test asks for a browser or for the built website."""
    return bool(WITH_PAGES & set(getattr(item, "fixturenames", ())))


def is_cell(item: pytest.Item) -> bool:
    """Whether this is a notebook's cell."""
    return item.path.suffix == ".ipynb"


def _units(items: Iterable[pytest.Item]) -> list[list[pytest.Item]]:
    """Tests that are taken or left together: a notebook's cells, and what is judged by one run of the grader."""
    units: dict[object, list[pytest.Item]] = {}
    for item in items:
        units.setdefault(_unit(item), []).append(item)
    return list(units.values())


def _unit(item: pytest.Item) -> object:
    if is_cell(item):
        return item.path
    if ONE_RUN.match(item.nodeid) and "graded" in getattr(item, "fixturenames", ()):
        return item.path, _parameters(item)["graded"]  # the user that grades
    return item.nodeid


def _affected(units: list[list[pytest.Item]], revision: str,
              budget_s: float) -> tuple[list[list[pytest.Item]], list[str]]:
    """The units that changed files affect, nearest first and cheap ones before expensive ones, up to the budget.

    The second value has a line for each edited test module or notebook of which some units were too costly.
    """
    near = distances(changed_since(revision))
    ranked = sorted((distance, costs.of(unit), number) for number, unit in enumerate(units)
                    if (distance := _distance(unit[0], near)) is not None)
    taken, spent_s, left_s = [], 0.0, {}
    for distance, cost_s, number in ranked:
        if spent_s + cost_s <= budget_s:
            taken.append(units[number])
            spent_s += cost_s
        elif distance == 0:
            file = units[number][0].nodeid.partition("::")[0]
            left_s[file] = left_s.get(file, 0.0) + cost_s
    return taken, [f"{file} ({cost_s:.0f} s)" for file, cost_s in sorted(left_s.items())]


def _distance(item: pytest.Item, near: dict[str, int]) -> int | None:
    """How near a changed file is to a test, None where it depends on none."""
    module = str(item.path.relative_to(ROOT)) if item.path.is_relative_to(ROOT) else ""
    found = [near[module]] if module in near else []
    return min([*found, *(near[name] + 1 for name in _own_files(item) if name in near)], default=None)


def _own_files(item: pytest.Item) -> list[str]:
    """The files that its parameters are, or are read from, and the one that its class is about."""
    paths = [getattr(one, "path", one) for one in (*_parameters(item).values(), getattr(item, "cls", None))]
    return [str(path.relative_to(ROOT)) for path in paths if isinstance(path, Path) and path.is_relative_to(ROOT)]


def _parameters(item: pytest.Item) -> dict[str, Any]:
    return getattr(getattr(item, "callspec", None), "params", {})
