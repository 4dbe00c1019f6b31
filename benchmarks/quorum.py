"""One of three replicas killed under torchft, and one of three ranks under torchrun: what the others lose.

Beside the page's own cells, three things that the page says and does not show: one of five replicas killed, with and
without the lines that close a survivor's connections; the lighthouse killed; and the lighthouse killed and begun anew.
"""
from __future__ import annotations

import contextlib
import io
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from benchmarks.chapter import code_that_binds
from benchmarks.process import ROOT
from benchmarks.report import Claim, Findings, Table, Unavailable
from book.parallel import quorum
from book.parallel.quorum import Attempt
from book.parallel.replicas import HEARTBEAT_S, JOIN_S, Replicas

PAGE = ROOT / "chapters" / "89_quorum.ipynb"
QUICK = {"num_kills": 3, "num_restarts": 1, "num_of_five": 2, "num_lighthouses": 1}
NOTE = ("The page's own cells, run again and again; who is killed, and when, is drawn anew. Under torchft with a "
        "heartbeat's limit of 1 s; under torchrun with a save after every 20 steps and a kill 2 to 13 steps after the "
        "first. Median (smallest–largest).")

FIVE = ("Five replicas, one of which is killed, and the seconds until the four others commit a step without it. In the "
        "second column a survivor whose all-reduce has failed keeps its sockets open: `average` without its last "
        f"lines; the process group's timeout is {quorum.PEER_S:.0f} s. Median (smallest–largest).")
BEACON = ("Three replicas whose lighthouse is killed after five steps, with `quorum_timeout` of "
          f"{quorum.QUORUM_S:.0f} s. In the second column they have `quorum_retries=3`, and a new lighthouse begins at "
          "the same address 1 s later.")


@dataclass(frozen=True)
class Kill:
    """What one kill has cost: steps dropped or done again, seconds without a new one; under torchft what was equal."""

    num_steps: int
    gap_s: float
    equal: bool = True
    error: float = 0.0


@dataclass(frozen=True)
class Beacon:
    """What became of three replicas without their lighthouse: who ended; attempts that did not count; seconds.

    The seconds are until all had ended, or until all three counted again.
    """

    num_ended: int
    num_dropped: int
    time_s: float


def measure(num_kills: int = 20, num_restarts: int = 5, num_of_five: int = 8, num_lighthouses: int = 8) -> Findings:
    """Kill so many replicas and ranks, each in a run of its own; raises `Unavailable` without torchft."""
    if not find_spec("torchft"):
        raise Unavailable("torchft is not installed: python -m pip install -r requirements-frameworks.txt")
    num_threads = torch.get_num_threads()
    try:
        kills = [replica_killed() for _ in range(num_kills)]
        restarts = [rank_killed() for _ in range(num_restarts)]
        gaps = [[one_of_five_killed(program) for _ in range(num_of_five)] for program in (quorum.train, left_open)]
        without = lighthouse_killed()
        anew = [lighthouse_killed(anew=True) for _ in range(num_lighthouses)]
    finally:
        torch.set_num_threads(num_threads)  # the page has set 1
    return Findings([_table(kills, restarts), _five_table(*gaps), _lighthouse_table(without, anew)], _claims(kills))


def replica_killed() -> Kill:
    """One run of the page's three replicas."""
    names = _run("Replicas", "killed_s", "quorum_s", "alone")
    return Kill(max(map(len, names["dropped"])), names["quorum_s"], all(len(one) == 1 for one in names["digests"]),
                names["error"])


def rank_killed() -> Kill:
    """One run of the page's three ranks under torchrun."""
    names = _run("Replicas", "restart_s")
    return Kill(names["done_again"], names["restart_s"])


def one_of_five_killed(program: Callable[..., None]) -> float:
    """Seconds from the death of one of five replicas to the first step that the four others commit without it."""
    with Replicas(min_replicas=2) as five:
        for replica in range(5):
            five.start(replica, program)
        five.listen(partial(_counted, range(5), 5, 0.0))
        victim = random.randrange(5)
        time.sleep(random.uniform(0, 0.5))  # some steps, and a part of one
        killed_s = five.kill(victim)
        five.listen(partial(_counted, {*range(5)} - {victim}, 1, killed_s, num_replicas=4))
        return min(one.time_s for one in _committed(five.told, 4, killed_s)) - killed_s


def left_open(replica: int, lighthouse: str, tell: Callable[[Attempt], None]) -> None:
    """A replica that trains as the page's do, and keeps the connections of an all-reduce that has failed."""
    quorum.average = _average_left_open
    quorum.train(replica, lighthouse, tell)


def _average_left_open(manager: Any, module: torch.nn.Module) -> None:
    gradients = [p.grad for p in module.parameters()]
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    manager.allreduce(flat).wait()
    if manager.errored() is None:
        for gradient, mean in zip(gradients, flat.split([gradient.numel() for gradient in gradients])):
            gradient.copy_(mean.view_as(gradient))


def with_retries(replica: int, lighthouse: str, tell: Callable[[Attempt], None]) -> None:
    """A replica that asks three times more for a quorum."""
    quorum.managed = partial(quorum.managed, quorum_retries=3)
    quorum.train(replica, lighthouse, tell)


def lighthouse_killed(anew: bool = False) -> Beacon:
    """Kill the lighthouse of three replicas, and perhaps begin a new one at its address."""
    with Replicas(min_replicas=2) as three, contextlib.ExitStack() as stack:
        for replica in range(3):
            three.start(replica, with_retries if anew else quorum.train)
        three.listen(partial(_counted, range(3), 5, 0.0))
        lighthouse = three.processes[0]
        lighthouse.kill()
        lighthouse.join()
        killed_s = time.time()
        if anew:
            time.sleep(1)
            stack.enter_context(_lighthouse(three.lighthouse))
        begun_s = time.time()
        three.listen(lambda told: anew and (_counted(range(3), 10, begun_s, told) or any(_ended(three))))
        ended = _ended(three)
        end_s = min((one.time_s for one in _committed(three.told, 3, begun_s) if anew), default=time.time())
        dropped = [one for one in three.told if not one.committed and one.time_s > killed_s]
        return Beacon(sum(ended), len(dropped), end_s - killed_s)


@contextlib.contextmanager
def _lighthouse(address: str) -> Iterator[None]:
    """torchft's own command, at this address."""
    command = [Path(sys.executable).with_name("torchft_lighthouse"), "--bind", address.removeprefix("http://"),
               "--min_replicas", "2", "--join_timeout_ms", str(round(1000 * JOIN_S)), "--quorum_tick_ms", "50",
               "--heartbeat_timeout_ms", str(round(1000 * HEARTBEAT_S))]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield
    finally:
        process.kill()
        process.wait()


def _ended(replicas: Replicas) -> list[bool]:
    return [code is not None for code in replicas.exit_codes().values()]


def _committed(told: Sequence[Attempt], num_replicas: int, since_s: float) -> list[Attempt]:
    return [one for one in told if one.committed and one.num_replicas == num_replicas and one.time_s > since_s]


def _counted(who: Collection[int], num_steps: int, since_s: float, told: Sequence[Attempt],
             num_replicas: int | None = None) -> bool:
    """Whether each of these has since then committed so many steps, with so many replicas (as many as they are)."""
    committed = [one.replica for one in _committed(told, num_replicas or len(who), since_s)]
    return all(committed.count(replica) >= num_steps for replica in who)


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


def _five_table(closed: Sequence[float], left_open: Sequence[float]) -> Table:
    late = [str(sum(gap_s > quorum.PEER_S for gap_s in gaps_s)) for gaps_s in (closed, left_open)]
    rows = [("runs, with a kill in each", str(len(closed)), str(len(left_open))),
            ("seconds without a new step", _spread(closed, 2), _spread(left_open, 2)),
            ("runs in which it was the timeout", *late)]
    return Table("One of five replicas dies", ("", "as on the page", "connections left open"), rows, FIVE)


def _lighthouse_table(without: Beacon, anew: Sequence[Beacon]) -> Table:
    """Runs with a new lighthouse fall into three kinds: none lost anything, some dropped attempts, some ended."""
    kinds = [[one for one in anew if kind(one)] for kind in (
        lambda one: one.num_ended, lambda one: one.num_dropped and not one.num_ended,
        lambda one: not (one.num_dropped or one.num_ended))]
    ended, dropped, whole = ([one.time_s for one in kind] for kind in kinds)
    rows = [("runs", "1", str(len(anew))),
            ("runs in which replicas ended", str(int(without.num_ended > 0)), str(len(ended))),
            ("seconds until then", f"{without.time_s:.1f}", _spread(ended, 1)),
            ("runs in which all three came together after dropped steps", "0", str(len(dropped))),
            ("seconds until then", "–", _spread(dropped, 1)),
            ("runs in which all three came together at once", "0", str(len(whole))),
            ("seconds until then", "–", _spread(whole, 1))]
    return Table("The lighthouse dies", ("", "none begins anew", "one begins anew"), rows, BEACON)


def _spread(values: Sequence[float], digits: int = 0) -> str:
    if not values:
        return "–"
    middle, least, most = (f"{value:.{digits}f}" for value in (statistics.median(values), min(values), max(values)))
    return f"{middle} ({least}–{most})"


def _claims(kills: Sequence[Kill]) -> list[Claim]:
    most, worst = max(kill.num_steps for kill in kills), max(kill.error for kill in kills)
    num_equal = sum(kill.equal for kill in kills)
    return [Claim("a replica that is killed costs the others one attempt or none", f"at most {most}", most <= 1),
            Claim("after every step all replicas hold the same bits", f"in {num_equal} of {len(kills)} runs",
                  num_equal == len(kills)),
            Claim("one process has the losses of the replicas within 1e-12", f"{worst:.1e}", worst < 1e-12)]
