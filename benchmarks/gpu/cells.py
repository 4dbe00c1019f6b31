"""A pytest plugin that notes what nbval says about each cell as it runs: loaded with `-p benchmarks.gpu.cells`."""
from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

LAUNCHED = re.compile(r"^(\d+) ranks? on (nccl|gloo)\b", re.M)  # the line that launch prints
COLOURS = re.compile(r"\x1b\[[0-9;]*m")
NUM_LINES = 12


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option that names the file."""
    parser.addoption("--cells-into", type=Path, help="write a line of JSON here when a cell starts and when it ends")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Note that a cell starts: if it crashes the kernel or is killed, nothing else is noted."""
    _note(item, {"event": "start", "source": item.cell.source})
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    """Note how a cell ended: the outcome of its call, or what went wrong before or after it."""
    report = yield
    if report.when == "call" or not report.passed:
        outcome = "not run" if hasattr(report, "wasxfail") or report.skipped else report.outcome
        _note(item, {"event": "end", "outcome": outcome, "seconds": report.duration, "launches": launches(item),
                     "why": first_lines(call.excinfo.value) if call.excinfo and outcome == "failed" else []})
    return report


def launches(item: pytest.Item) -> list[tuple[int, str]]:
    """How many ranks each launch in a cell printed that it started, and on which backend."""
    streams = [output.get("text", "") for output in item.test_outputs or [] if output.get("output_type") == "stream"]
    return [(int(num_ranks), backend) for num_ranks, backend in LAUNCHED.findall("".join(streams))]


def first_lines(error: BaseException) -> list[str]:
    """The first lines of what nbval says about a cell: how the outputs differ, or the error and its last line."""
    inner = COLOURS.sub("", getattr(error, "inner_traceback", "") or "")
    lines = [line.rstrip() for line in inner.splitlines() if line.strip()]
    head = COLOURS.sub("", str(error)).strip().splitlines()[:NUM_LINES] or [type(error).__name__]
    raised = next((number for number, line in enumerate(lines) if re.match(r"[\w.]*(Error|Failed|Interrupt): ", line)),
                  None)
    return head + (lines[raised:] if raised is not None and "differ" not in head[0] else lines)[:NUM_LINES]


def _note(item: pytest.Item, what: dict[str, Any]) -> None:
    with item.config.getoption("--cells-into").open("a", encoding="utf-8") as file:
        file.write(json.dumps({"cell": item.cell_num, **what}) + "\n")
