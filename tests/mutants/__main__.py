"""The command line: which target's tests find each fault, as a table.

python -m tests.mutants                        every fault, with `make quick`, then `make test` if that does not find it
python -m tests.mutants 07 links --tier quick  some of them, by parts of their names
python -m tests.mutants --jobs 2 --command "{python} -m pytest -x tests/test_simulate.py" simulate
"""
from __future__ import annotations

import argparse
import os
import queue
import re
import shlex
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from tests.mutants.copies import Copy, MutantError

PATCHES = Path(__file__).parent
TARGETS = {"quick": "quick", "test": "test", "all": "test-all"}  # of make, by tier
# As in the Makefile, up to the first failure. An applied patch does not apply again: that test would find every fault.
# Not through PYTEST_ADDOPTS, which a pytest that a test starts would take for its own.
PYTEST = "-m pytest -rfEs --dist loadscope -x --ignore=tests/test_mutants.py"
SURVIVES = "SURVIVES"
FAILED = re.compile(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", re.M)  # pytest's short summary


@dataclass(frozen=True)
class Run:
    """A command that was run in a copy: whether it passed, the first test that failed, and how long it took."""

    passed: bool
    first: str
    seconds: float


@dataclass(frozen=True)
class Verdict:
    """Which tier found a fault, by which test, and the seconds until then, those of the tiers before it included."""

    mutant: str
    tier: str
    test: str
    seconds: float


def main(arguments: Sequence[str] | None = None) -> int:
    """Try faults and print what finds them; 1 if some survive, 2 if they could not be tried."""
    asked = _parser().parse_args(arguments)
    try:
        found = list(tried(asked))
    except MutantError as error:
        print(error, file=sys.stderr)
        return 2
    lost = [verdict.mutant for verdict in found if verdict.tier == SURVIVES]
    tiers = dict.fromkeys(verdict.tier for verdict in found if verdict.tier != SURVIVES)
    counts = [f"{sum(verdict.tier == tier for verdict in found)} by {tier}" for tier in sorted(tiers)]
    print(f"{len(found) - len(lost)} of {len(found)} found" + (f": {', '.join(counts)}" if counts else ""))
    return 1 if lost else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description="Show which tests find known faults.")
    parser.add_argument("names", nargs="*", help="parts of the names of the patches to try (default: all)")
    parser.add_argument("--tier", default="quick,test", help="targets to try, in this order: quick, test, all")
    parser.add_argument("--jobs", type=int, default=1, help="how many faults to try side by side")
    parser.add_argument("--command", help="what to run in place of make; {python} stands for the copy's Python, {tier} "
                                          "for the tier")
    parser.add_argument("--limit", type=float, default=3600, help="seconds after which a run counts as failed")
    return parser


def tried(asked: argparse.Namespace) -> Iterator[Verdict]:
    """What became of each fault, printed as it comes. Raises MutantError where they can't be tried."""
    patches, tiers = chosen(asked.names), asked.tier.split(",")
    if not asked.command and set(tiers) - set(TARGETS):
        raise MutantError(f"--tier names targets to try, from {', '.join(TARGETS)}, not {asked.tier}")
    with ExitStack() as stack:
        folders = [stack.enter_context(tempfile.TemporaryDirectory(prefix="mutants-")) for _ in range(asked.jobs)]
        copies = [Copy(Path(folder).resolve()) for folder in folders]
        for patch in patches:  # before minutes are spent on others
            copies[0].apply(patch)
            copies[0].restore()
        for tier in tiers:
            _check_faultless(copies[0], tier, asked)
        free: queue.SimpleQueue[Copy] = queue.SimpleQueue()
        for copy in copies:
            free.put(copy)
        width = max(len(patch.stem) for patch in patches)
        print(f"{'mutant':{width}}  {'found by':8}  {'seconds':>7}  first failing test")
        pool = stack.enter_context(ThreadPoolExecutor(asked.jobs))
        stack.callback(pool.shutdown, cancel_futures=True)
        for done in as_completed([pool.submit(_in_free_copy, free, patch, tiers, asked) for patch in patches]):
            verdict = done.result()
            print(f"{verdict.mutant:{width}}  {verdict.tier:8}  {verdict.seconds:7.0f}  {verdict.test}", flush=True)
            yield verdict


def chosen(names: Sequence[str]) -> list[Path]:
    """The patches whose names contain one of these texts, all if there are none."""
    patches = sorted(PATCHES.glob("*.patch"))
    for name in names:
        if not any(name in patch.stem for patch in patches):
            raise MutantError(f"no patch in {PATCHES} has {name!r} in its name")
    return [patch for patch in patches if not names or any(name in patch.stem for name in names)]


def _check_faultless(copy: Copy, tier: str, asked: argparse.Namespace) -> None:
    run = _run(copy, tier, asked)
    copy.restore()
    if not run.passed:
        raise MutantError(f"the tests of {tier} fail without any fault, so what they find says nothing: {run.first}")


def _in_free_copy(free: queue.SimpleQueue[Copy], patch: Path, tiers: Sequence[str],
                  asked: argparse.Namespace) -> Verdict:
    copy = free.get()
    try:
        return _judged(copy, patch, tiers, lambda tier: _run(copy, tier, asked))
    finally:
        free.put(copy)


def _judged(copy: Copy, patch: Path, tiers: Sequence[str], run: Callable[[str], Run]) -> Verdict:
    seconds = 0.0
    for tier in tiers:
        copy.apply(patch)
        result = run(tier)
        copy.restore()
        seconds += result.seconds
        if not result.passed:
            return Verdict(patch.stem, tier, result.first, seconds)
    return Verdict(patch.stem, SURVIVES, "", seconds)


def _run(copy: Copy, tier: str, asked: argparse.Namespace) -> Run:
    """The tests of a tier in a copy, up to the first that fails."""
    num_workers = max(1, (os.cpu_count() or 1) // asked.jobs)
    command = ["make", TARGETS.get(tier, tier), f"JOBS={num_workers}", f"PYTEST={copy.python} {PYTEST}"]
    if asked.command:
        command = [word.replace("{python}", str(copy.python)).replace("{tier}", tier)
                   for word in shlex.split(asked.command)]
    start_s = time.monotonic()
    status, printed = copy.run(command, asked.limit)
    return Run(status == 0, first_failure(status, printed, asked.limit), time.monotonic() - start_s)


def first_failure(status: int | None, printed: str, limit_s: float) -> str:
    """The first test that failed; of a run that failed without one, its last line."""
    if status is None:
        return f"not done after {limit_s:g} s"
    failed = FAILED.search(printed)
    lines = [line for line in printed.splitlines() if line.strip()]
    return failed[1] if failed else lines[-1] if lines else f"exit status {status}"


if __name__ == "__main__":
    sys.exit(main())
