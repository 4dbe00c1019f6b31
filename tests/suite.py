"""A pytest plugin: the two marks, the order in which tests begin, and what a slow day leaves out.

A test marked `slow` runs in `make test-all` alone. `browser` is put on every test that asks for a browser or for the
built website. A notebook is skipped where a package is missing that its system may not have. With BEGIN_UNTIL in the
environment, in seconds since 1970, a module, class or notebook that has not begun by then is skipped, and named; the
next run in the same folder begins with what has waited longest.
"""
from __future__ import annotations

import os
import time
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

BEGIN_UNTIL = "LOCKSTEP_BEGIN_UNTIL"
LEFT_OUT = Path(__file__).parents[1] / "_build" / "left_out"  # a line each, the one that has waited longest first
FAILED = LEFT_OUT.with_name("failed")  # a line each, as pytest takes them: a notebook whole
WHY = "left out: it had not begun in time"
NEEDS = {"89_quorum.ipynb": "torchft"}  # what a notebook needs that some systems can't have
WITH_PAGES = {"browser", "chromium", "site", "site_url", "bare_site"}


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark what needs a browser, before `-m` chooses; have the longest begin first, so that workers end together."""
    for item in items:
        if WITH_PAGES & set(getattr(item, "fixturenames", ())):
            item.add_marker(pytest.mark.browser)
        needed = NEEDS.get(item.path.name)
        if needed and not find_spec(needed):
            item.add_marker(pytest.mark.skip(reason=missing(needed)))
    scopes: dict[str, list[pytest.Item]] = {}
    for item in items:
        scopes.setdefault(scope_of(item.nodeid), []).append(item)
    waiting = left_out()
    order = sorted(scopes, key=lambda scope: (waiting.index(scope) if scope in waiting else len(waiting),
                                              *_shortness(scopes[scope])))
    items[:] = [item for scope in order for item in scopes[scope]]


def missing(package: str) -> str:
    """Why a test that needs this package is skipped."""
    return (f"{package} is not installed: python -m pip install -r requirements-frameworks.txt (make test does, where "
            "there is a wheel)")


def _shortness(tests: list[pytest.Item]) -> tuple[bool, int]:
    """Grows the less time these tests are likely to take: slow ones alone, and many cells or slow ones, come first."""
    num_slow = sum(item.get_closest_marker("slow") is not None or item.path.suffix == ".ipynb" for item in tests)
    return num_slow < len(tests), -num_slow


def scope_of(nodeid: str) -> str:
    """What xdist's `loadscope` gives to one worker: a module, a class or a notebook."""
    return nodeid.rsplit("::", 1)[0]


class Guard:
    """Skips what begins too late, in the process that runs the tests."""

    def __init__(self, until_s: float) -> None:
        self._until_s = until_s
        self._begun: set[str] = set()

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        """Skip a test of a scope that has not begun in time."""
        scope = scope_of(item.nodeid)
        if scope not in self._begun and time.time() > self._until_s:
            pytest.skip(WHY)
        self._begun.add(scope)


class Teller:
    """Names failures at once, which pytest does minutes later. Keeps them and what was left out for the next run."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._late: dict[str, None] = {}
        self._done: set[str] = set()
        self._failed: dict[str, None] = {}

    def pytest_sessionstart(self) -> None:
        """Forget what had failed."""
        FAILED.unlink(missing_ok=True)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Write the name of a failed test."""
        terminal = self._config.pluginmanager.get_plugin("terminalreporter")
        if report.failed and terminal is not None and self._config.get_verbosity() <= 0:
            terminal.write_line(f"\nFAILED {report.nodeid}", red=True)
        if report.failed:
            path, _, _ = report.nodeid.partition("::")
            self._failed[path if path.endswith(".ipynb") else report.nodeid] = None
        if report.skipped and WHY in str(report.longrepr):
            self._late[scope_of(report.nodeid)] = None
        elif report.when == "call":
            self._done.add(scope_of(report.nodeid))

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """Name what was left out, and have the next run begin with it; keep what failed."""
        for scope in self._late:
            terminalreporter.write_line(f"{WHY}: {scope}", yellow=True)
        remember(left_out(), self._late, self._done)
        if self._failed:
            FAILED.parent.mkdir(exist_ok=True)
            FAILED.write_text("".join(f"{test}\n" for test in self._failed), "utf-8")


def left_out() -> list[str]:
    """What earlier runs in this folder have left out and none has run since, the oldest first."""
    return LEFT_OUT.read_text("utf-8").splitlines() if LEFT_OUT.exists() else []


def remember(waiting: Iterable[str], late: Iterable[str], done: Iterable[str]) -> None:
    """Keep what still waits, behind it what was left out now."""
    kept = list(dict.fromkeys([*waiting, *late]))
    kept = [scope for scope in kept if scope not in done]
    if kept or LEFT_OUT.exists():
        LEFT_OUT.parent.mkdir(exist_ok=True)
        LEFT_OUT.write_text("".join(f"{scope}\n" for scope in kept), "utf-8")


def pytest_configure(config: pytest.Config) -> None:
    """Watch the time where tests run, and tell where the terminal is: xdist's workers report to that process."""
    if until := os.environ.get(BEGIN_UNTIL):
        config.pluginmanager.register(Guard(float(until)))
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Teller(config))
