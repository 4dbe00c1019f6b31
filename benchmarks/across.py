"""All-reduces across hosts whose ranks share a card: measured under torchrun, and predicted by the simulator."""
from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from benchmarks.report import Claim, Findings, Table, Unavailable, duration
from book.collectives import (halving_doubling_all_reduce, hierarchical_all_reduce, parameter_server_all_reduce,
                              ring_all_reduce, tree_all_reduce)
from book.cost import Link, Network
from book.hosts import Hosts, NoHosts
from book.schedule import Schedule
from book.simulate import simulate

PROGRAM = "benchmarks.programs.across_hosts"
QUICK = {"layouts": ((2, 2),), "num_rounds": 2}
LAYOUTS = ((2, 2), (3, 2))  # hosts, ranks on each
BITS_PER_S, BUFFER_BYTES = 20_000_000, 1 << 20
MESSAGE_BYTES = (1 << 14, 1 << 18)  # latency and bandwidth follow from the times of two messages
PROMISED = 0.25
RING = "ring"
COLUMNS = ("all-reduce", "measured", "predicted", "over the ring: measured", "predicted with shared cards",
           "with a link for each pair")
NOTE = ("Hosts are network namespaces with cards of 20 Mbit/s each way; 1 MB; the time is that of the slowest rank, "
        "the median of all rounds. Latency and bandwidth come from the times of two messages, on both kinds of links, "
        "in the same run. The last column is what the simulator says where no two messages share a card.")


class Compared(NamedTuple):
    """Seconds of one all-reduce: measured, predicted with shared cards, and with a link for each pair of ranks."""

    measured_s: float
    predicted_s: float
    unshared_s: float


def measure(layouts: Sequence[tuple[int, int]] = LAYOUTS, num_rounds: int = 5) -> Findings:
    """Run every all-reduce on each layout, by turns, and compare each one's time with the ring's."""
    found = Findings()
    for num_hosts, ranks_per_host in layouts:
        compared = compare(num_hosts, ranks_per_host, num_rounds)
        title = f"All-reduce on {num_hosts} hosts of {ranks_per_host} ranks"
        found.tables.append(Table(title, COLUMNS, [_row(name, one, compared[RING]) for name, one in compared.items()],
                                  NOTE))
        worst = max(abs(error) for error in errors(compared).values())
        found.claims.append(Claim(f"{num_hosts} × {ranks_per_host} ranks that share cards: times relative to the "
                                  f"ring's are predicted within {PROMISED:.0%}", f"{worst:.1%}", worst <= PROMISED))
    return found


def schedules(num_hosts: int, ranks_per_host: int) -> dict[str, Schedule]:
    """The all-reduces that are compared."""
    world_size = num_hosts * ranks_per_host
    return {RING: ring_all_reduce(world_size), "hierarchical": hierarchical_all_reduce(num_hosts, ranks_per_host),
            "halving–doubling": halving_doubling_all_reduce(world_size), "tree": tree_all_reduce(world_size),
            "parameter server": parameter_server_all_reduce(world_size)}


def compare(num_hosts: int, ranks_per_host: int, num_rounds: int) -> dict[str, Compared]:
    """Measure and predict every all-reduce on so many hosts. Raises Unavailable where hosts can't be made."""
    try:
        with Hosts(num_hosts, BITS_PER_S) as hosts:
            said = json.loads(hosts.torchrun(ranks_per_host, ["-m", PROGRAM, str(BUFFER_BYTES), str(num_rounds)]))
    except NoHosts as reason:
        raise Unavailable(str(reason)) from None
    inside, across = (link_of(MESSAGE_BYTES, said["messages"][where]) for where in ("inside", "across"))
    shared, rails = (Network(ranks_per_host, inside, across, cards) for cards in (1, ranks_per_host))
    return {name: Compared(statistics.median(one[name] for one in said["rounds"]),
                           *(simulate(schedule, BUFFER_BYTES, one).duration_s or 0.0 for one in (shared, rails)))
            for name, schedule in schedules(num_hosts, ranks_per_host).items()}


def link_of(sizes: Sequence[int], seconds: Sequence[float]) -> Link:
    """The link on which a message of each of two sizes, in bytes, takes so long."""
    bandwidth = (sizes[1] - sizes[0]) / max(seconds[1] - seconds[0], 1e-9)
    return Link(max(seconds[0] - sizes[0] / bandwidth, 0.0), bandwidth)


def errors(compared: Mapping[str, Compared]) -> dict[str, float]:
    """By how much each predicted time, relative to the ring's, differs from the measured one: 0.1 is 10 % too much."""
    ring = compared[RING]
    return {name: one.predicted_s / ring.predicted_s / (one.measured_s / ring.measured_s) - 1
            for name, one in compared.items()}


def _row(name: str, one: Compared, ring: Compared) -> tuple[str, ...]:
    return (name, duration(one.measured_s), duration(one.predicted_s),
            *(f"{a / b:.2f}" for a, b in zip(one, ring)))
