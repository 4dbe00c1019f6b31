"""A pytest plugin for nbval: it names cells by their ids, compares only checks, and writes verdicts into a file.

It runs in pytest's process, outside the sandbox, so a submission can't write the verdicts.
"""
from __future__ import annotations

import itertools
import json
import os
import time
from queue import Empty
from typing import Any

import pytest

from book.grading.lab_schema import KEY

RESULT = "LOCKSTEP_RESULT"  # environment variable: the file for the verdicts
MAX_TEXT = 4000
PICTURES, MAX_PICTURES = "play-", 4 << 20  # the ids of cells that show a run, and how many characters they may show
LOOK_S = 1.0  # how often nbval checks whether the kernel that it waits for still runs
LONGEST_FOLDER = 80  # a socket's path has room for about 100 bytes
found: list[dict[str, Any]] = []


def pytest_configure(config: pytest.Config) -> None:
    """Start kernels on sockets in the run's folder, and notice at once when one dies.

    nbval itself waits for a dead kernel's reply until the time limit of the cell.
    """
    from nbval import kernel  # mypy runs without it

    kernel.RunningKernel.await_reply = await_reply
    if len(os.fsencode(config.rootpath)) <= LONGEST_FOLDER:
        use_sockets(kernel.KernelManager, str(config.rootpath))


def use_sockets(manager: Any, folder: str) -> None:
    """Have nbval start its kernels with this class of managers, and speak to them over sockets in the folder.

    Over TCP a kernel is given free ports, and binds them a second later: by then another process, such as a rank of
    another notebook, may have taken one, and the kernel dies.
    """
    from nbval import kernel

    names = (f"{folder}/{number}" for number in itertools.count())
    kernel.KernelManager = lambda **options: manager(transport="ipc", ip=next(names), **options)


def await_reply(kernel: Any, msg_id: str, timeout: float) -> None:
    """Do what nbval's own method does, but raise RuntimeError if the kernel has died.

    Raises queue.Empty after `timeout` seconds.
    """
    end_s = time.monotonic() + timeout
    while True:
        alive = kernel.is_alive()
        try:
            reply = kernel.get_message("shell", timeout=max(0.0, min(LOOK_S, end_s - time.monotonic())))
        except Empty:
            if not alive:
                raise RuntimeError("the kernel died") from None
            if time.monotonic() >= end_s:
                raise
            continue
        if reply["parent_header"].get("msg_id") == msg_id:
            if reply["content"]["status"] == "aborted":
                raise RuntimeError("the kernel aborted the request")
            return


def mark(item: Any) -> dict[str, Any]:
    """The lab metadata of the cell that a test item stands for."""
    return getattr(item, "cell", {}).get("metadata", {}).get(KEY, {})


def pytest_collection_modifyitems(items: list[Any]) -> None:
    """Compare only the outputs of checks, and ignore nbval's marker comments in other cells."""
    for item in items:
        kind = mark(item).get("kind")
        if kind != "check":
            item.options.update(check=False, skip=False, check_exception=False)


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: Any, call: Any) -> Any:
    """Record how a cell ended. Only a plain pass counts, not a skip, an expected failure or an unexpected pass."""
    report = (yield).get_result()
    if report.when == "call" or (report.when == "setup" and not report.passed):
        ok = report.when == "call" and report.outcome == "passed" and not hasattr(report, "wasxfail")
        error = call.excinfo.value if call.excinfo else None
        found.append({"id": mark(item).get("id"), "kind": mark(item).get("kind"), "ok": ok,
                      "outcome": "xfail" if hasattr(report, "wasxfail") else report.outcome,
                      "stopped": report.outcome == "failed" and stopped(error),
                      "message": str(error or "")[:MAX_TEXT],
                      "traceback": str(getattr(error, "inner_traceback", ""))[-MAX_TEXT:],
                      "outputs": outputs(item) if ok else [], "seconds": round(call.duration, 2)})


def stopped(error: BaseException | None) -> bool:
    """Whether nbval ended a cell at its time limit, or lost its kernel; nothing that the cell prints can say so.

    nbval raises RuntimeError for a kernel that is lost. Of a cell that fails it raises NbCellError, with a message of
    its own before what the cell printed. Other errors come from messages that the cell forged. mypy runs without nbval,
    so NbCellError is known by its name.
    """
    late = type(error).__name__ == "NbCellError" and str(error and error.args[0]).startswith("Timeout of ")
    return late or type(error) is RuntimeError


def outputs(item: Any) -> list[dict[str, Any]]:
    """What a check printed, for the reference run, and what a cell shows of a run, for the student."""
    of = mark(item)
    shows = of.get("kind") == "setup" and str(of.get("id")).startswith(PICTURES)
    found = [dict(out) for out in item.test_outputs or []] if shows or of.get("kind") == "check" else []
    return found if not shows or len(json.dumps(found)) <= MAX_PICTURES else []


def pytest_sessionfinish(session: Any, exitstatus: int) -> None:
    """Write all verdicts atomically: if the file exists, it is complete."""
    path = os.environ[RESULT]
    with open(path + ".part", "w") as file:
        json.dump({"cells": found, "exit": int(exitstatus)}, file)
    os.replace(path + ".part", path)
