"""One of three replicas killed under torchft, and one of three ranks under torchrun: what the others lose."""
from __future__ import annotations

import contextlib
import io
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch

from benchmarks.chapter import code_that_binds
from benchmarks.process import ROOT
from benchmarks.report import Claim, Findings, Table, Unavailable

PAGE = ROOT / "chapters" / "89_quorum.ipynb"
QUICK = {"num_kills": 3, "num_restarts": 1}
NOTE = ("The page's own cells, run again and again; who is killed, and when, is drawn anew. Under torchft with a "
        "heartbeat's limit of 1 s; under torchrun with a save after every 20 steps and a kill 2 to 13 steps after the "
        "first. Median (smallest–largest).")


@dataclass(frozen=True)
class Kill:
    """What one kill has cost: steps dropped or done again, seconds without a new one; under torchft what was equal."""

    num_steps: int
    gap_s: float
    equal: bool = True
    error: float = 0.0


def measure(num_kills: int = 20, num_restarts: int = 5) -> Findings:
    """Kill so many replicas and ranks, each in a run of its own; raises `Unavailable` without torchft."""
    if not find_spec("torchft"):
        raise Unavailable("torchft is not installed: python -m pip install -r requirements-frameworks.txt")
    num_threads = torch.get_num_threads()
    try:
        kills = [replica_killed() for _ in range(num_kills)]
        restarts = [rank_killed() for _ in range(num_restarts)]
    finally:
        torch.set_num_threads(num_threads)  # the page has set 1
    return Findings([_table(kills, restarts)], _claims(kills))


def replica_killed() -> Kill:
    """One run of the page's three replicas."""
    names = _run("Replicas", "killed_s", "quorum_s", "alone")
    return Kill(max(map(len, names["dropped"])), names["quorum_s"], all(len(one) == 1 for one in names["digests"]),
                names["error"])


def rank_killed() -> Kill:
    """One run of the page's three ranks under torchrun."""
    names = _run("Replicas", "restart_s")
    return Kill(names["done_again"], names["restart_s"])


def _run(*bound: str) -> dict[str, Any]:
    """The names that the page's cells leave which bind these names, run one after the other."""
    names: dict[str, Any] = {"__name__": "page"}
    with contextlib.redirect_stdout(io.StringIO()):
        for name in bound:
            exec(compile(code_that_binds(PAGE, name), str(PAGE), "exec"), names)
    return names


def _table(kills: Sequence[Kill], restarts: Sequence[Kill]) -> Table:
    dropped = [kill.num_steps for kill in kills]
    rows = [("runs, with a kill in each", str(len(kills)), str(len(restarts))),
            ("steps dropped, or done again", _spread(dropped), _spread([kill.num_steps for kill in restarts])),
            ("runs in which none was", str(dropped.count(0)), str(sum(not kill.num_steps for kill in restarts))),
            ("seconds without a new step", _spread([kill.gap_s for kill in kills], 2),
             _spread([kill.gap_s for kill in restarts], 1))]
    return Table("A replica dies, or a rank", ("", "torchft", "torchrun"), rows, NOTE)


def _spread(values: Sequence[float], digits: int = 0) -> str:
    middle, least, most = (f"{value:.{digits}f}" for value in (statistics.median(values), min(values), max(values)))
    return f"{middle} ({least}–{most})"


def _claims(kills: Sequence[Kill]) -> list[Claim]:
    most, worst = max(kill.num_steps for kill in kills), max(kill.error for kill in kills)
    num_equal = sum(kill.equal for kill in kills)
    return [Claim("a replica that is killed costs the others one attempt or none", f"at most {most}", most <= 1),
            Claim("after every step all replicas hold the same bits", f"in {num_equal} of {len(kills)} runs",
                  num_equal == len(kills)),
            Claim("one process has the losses of the replicas within 1e-12", f"{worst:.1e}", worst < 1e-12)]
