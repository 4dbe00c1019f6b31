"""L3, lab 12: variables of ranks on several hosts, a measured link, what crosses between hosts, who shares a card."""
from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np

from book.checks.verdict import flat, listed, refuse, require, short
from book.trace import Trace

PROMISED = 0.25  # by how much a measured link may be wrong
PREDICTED = 0.01  # by how much a predicted ratio may be wrong
VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")


def environments(environment: Callable[[int, int], Any], addresses: Sequence[str], ranks_per_host: int, port: int,
                 first: int = 0) -> list[Mapping[str, str]]:
    """`environment(host, local rank)` must be what a launcher sets; returns all of them, by rank.

    `addresses` are the hosts'. Ranks count through host by host, from host `first`: 0, or the last and backwards.
    """
    num_hosts, found = len(addresses), {}
    every = {(host, local): environment(host, local) for host in range(num_hosts) for local in range(ranks_per_host)}
    for (host, local), got in every.items():
        where = f"host {host}, local rank {local}"
        require(isinstance(got, Mapping) and set(got) == set(VARIABLES),
                f"{where}: return a dict with the keys {listed(VARIABLES)}, and no others")
        odd = [name for name in VARIABLES if not isinstance(got[name], str)]
        refuse(odd, f"{where}: {listed(odd)} is no string: os.environ takes strings only")
    in_turn = all(got["RANK"] == str(local * num_hosts + abs(first - host)) for (host, local), got in every.items())
    for (host, local), got in every.items():
        where = f"host {host}, local rank {local}"
        _counts(got, where, num_hosts, ranks_per_host, host, abs(first - host), local, in_turn)
        _meeting(got, where, addresses, first, host, port)
        found[int(got["RANK"])] = got
    return [found[rank] for rank in sorted(found)]


def _counts(got: Mapping[str, str], where: str, num_hosts: int, ranks_per_host: int, host: int, group: int,
            local: int, in_turn: bool) -> None:
    """The numbers among a rank's variables; `in_turn` says whether ranks are dealt out to the hosts in turn."""
    rank, world_size = group * ranks_per_host + local, num_hosts * ranks_per_host
    where = f"{where}: "
    refuse(got["WORLD_SIZE"] == str(ranks_per_host) and num_hosts > 1,
           f"{where}WORLD_SIZE is {ranks_per_host}, the ranks of one host: each host would train alone")
    refuse(got["WORLD_SIZE"] == str(num_hosts) and ranks_per_host > 1,
           f"{where}WORLD_SIZE is {num_hosts}, the number of hosts: it counts ranks")
    refuse(got["RANK"] == str(local) != str(rank),
           f"{where}RANK is {local}, the local rank: the host before has a rank of that number")
    refuse(in_turn and got["RANK"] != str(rank),
           f"{where}RANK is {got['RANK']}: ranks are dealt out to the hosts in turn, so that neighbours in a ring are "
           "never on one host; count through host by host")
    refuse(got["LOCAL_RANK"] == str(rank) != str(local),
           f"{where}LOCAL_RANK is {rank}, the rank: it chooses the GPU, and this host has GPUs 0 to "
           f"{ranks_per_host - 1}")
    refuse(got["LOCAL_WORLD_SIZE"] == str(world_size) and num_hosts > 1,
           f"{where}LOCAL_WORLD_SIZE is {world_size}, all ranks: it counts those of this host")
    refuse(got["GROUP_RANK"] == str(host) != str(group),
           f"{where}GROUP_RANK is {host}, but ranks are counted from the last host on")
    refuse(got["GROUP_RANK"] == str(local) != str(group),
           f"{where}GROUP_RANK is {local}, the local rank: it is the number of the host, the same for all of its ranks")
    require(got["RANK"] == str(rank), f"{where}RANK is {got['RANK']!r}, it should be {str(rank)!r}: ranks count from "
            f"0, and before those of this host come {group} times the {ranks_per_host} of a host")
    want = {"RANK": rank, "LOCAL_RANK": local, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": ranks_per_host,
            "GROUP_RANK": group}
    for name, value in want.items():
        require(got[name] == str(value), f"{where}{name} is {got[name]!r}, it should be {str(value)!r}")


def _meeting(got: Mapping[str, str], where: str, addresses: Sequence[str], first: int, host: int, port: int) -> None:
    """Where a rank looks for the store."""
    address, master = got["MASTER_ADDR"], addresses[first]
    refuse(address in ("localhost", "127.0.0.1") and address not in addresses,
           f"{where}: MASTER_ADDR is {address}, and that is each host itself: nobody listens there but on one host")
    refuse(address != master and master in address, f"{where}: MASTER_ADDR is {address!r}: it is the address alone, "
           f"{master}, without a scheme or a port")
    refuse(address == addresses[host] != master,
           f"{where}: MASTER_ADDR is this host's own address. Rank 0 opens the store, on {master}: all need that")
    require(address == master, f"{where}: MASTER_ADDR is {address!r}, but rank 0 opens the store, on {master}")
    require(got["MASTER_PORT"] == str(port),
            f"{where}: MASTER_PORT is {got['MASTER_PORT']!r}: all ranks need the same port, {port}")


def measured_link(got: Any, latency_s: float, bytes_per_s: float) -> None:
    """(latency, bytes per second) as measured must be within 25 % of what the link has."""
    require(isinstance(got, tuple) and len(got) == 2 and all(isinstance(x, (int, float)) for x in got),
            "measure returns two numbers: the latency in seconds, and bytes per second")
    latency, speed = got
    refuse(_near(latency, 2 * latency_s) and _near(speed, bytes_per_s / 2),
           "the latency is twice, the bandwidth half of the link's: a ping is two messages, one there and one back")
    refuse(_near(latency, bytes_per_s) and _near(speed, latency_s), "the two numbers are exchanged: the latency comes "
                                                                    "first")
    for factor, unit in ((1e-6, "megabytes"), (8e-6, "megabits")):
        refuse(_near(speed, factor * bytes_per_s), f"the bandwidth is in {unit} per second: give bytes per second")
    refuse(_near(latency, 1e3 * latency_s), "the latency is in milliseconds: give seconds")
    refuse(_near(speed, 8 * bytes_per_s), "the bandwidth is eight times the link's: bits, not bytes")
    refuse(_near(speed, 1 / bytes_per_s), "you give seconds per byte: turn it round")
    refuse(_near(speed, 2 * bytes_per_s), "the bandwidth is twice the link's: are the bytes of both ways counted, and "
                                          "the time of one?")
    refuse(_near(speed, bytes_per_s / 2), "the bandwidth is half of the link's: a ping is two messages")
    refuse(_near(latency, 2 * latency_s), "the latency is twice the link's: a ping is two messages, each waits once. "
                                          "Or is it a mean of all times? The first ping connects, some are disturbed")
    refuse(_near(speed, bytes_per_s) and _near(latency, latency_s / 2), "the latency is half of the link's: is a time "
           "halved twice?")
    require(_near(speed, bytes_per_s), f"the bandwidth is {short(speed / bytes_per_s)} times the link's. Take two "
            "sizes far apart, and the difference of their times; the first ping connects, and some are disturbed")
    require(_near(latency, latency_s), f"the latency is {short(latency / latency_s)} times the link's. It is what is "
            "left of the time when the bytes are paid for; the first ping connects, and some are disturbed")


def _near(got: float, want: float) -> bool:
    return abs(got / want - 1) <= PROMISED


def crossing_bytes(trace: Trace, ranks_per_host: int, num_bytes: int) -> int:
    """Of each host's buffers, no more than one may go across; returns the bytes that the hosts' ranks put in, all told.

    What counts is the buffer that each rank gives to a collective of ranks on several hosts.
    """
    world_size = trace.world_size
    across = [0.0] * (world_size // ranks_per_host)
    scattered: Counter[int] = Counter()  # the all-gather that follows a reduce-scatter is the second half of a sum
    most = num_bytes + 8 * world_size  # a buffer that is padded, for each rank and for each host
    for event in trace.of_kind("collective"):
        group = event.group or ()
        if len({rank // ranks_per_host for rank in group}) > 1:
            refuse(len(group) == world_size and ranks_per_host > 1,
                   f"{event.op} runs over all ranks: the library's own all-reduce does not "
                                             "know which of them share a host here. Use inside and across")
            sent_bytes = event.num_bytes or 0
            if event.op == "reduce_scatter":
                scattered[event.rank] += sent_bytes
            if event.op == "all_gather":
                scattered[event.rank] -= sent_bytes
                refuse(scattered[event.rank] < 0, "an all-gather across hosts brings each host the others' buffers, "
                                                  "one after the other; an all-reduce brings their sum")
            else:
                across[event.rank // ranks_per_host] += sent_bytes
    for host, sent in enumerate(across):
        refuse(sent >= ranks_per_host * num_bytes and ranks_per_host > 1,
               f"the ranks of host {host} give {sent:.0f} bytes to collectives across, {ranks_per_host} whole buffers: "
               "each rank needs to take only its share of the sum across")
        require(sent <= most, f"the ranks of host {host} give {sent:.0f} bytes to collectives across, and one buffer "
                              f"is {num_bytes}: what goes across twice?")
    return round(sum(across))


def handed_out(before: Sequence[Any], after: Sequence[Any], ranks_per_host: int) -> None:
    """The buffers, by rank, must not hold the sum in one share for each rank of a host alone, nor the largest."""
    first, last = np.stack([flat(b) for b in before]), np.stack([flat(b) for b in after])
    if first.shape != last.shape or ranks_per_host == 1 or len(first) == ranks_per_host:
        return
    right, share = last == first.sum(axis=0), -(-first.shape[1] // ranks_per_host)
    own = np.stack([np.arange(first.shape[1]) // share == rank % ranks_per_host for rank in range(len(first))])
    refuse(not right.all() and right[own].all() and (last == first)[~own].all(), "each rank has the sum in its own "
           "share and its own numbers elsewhere: the all-gather inside brings the others' shares")
    hosts = first.reshape(-1, ranks_per_host, first.shape[1]).sum(axis=1)
    for operation, picked in (("MAX", hosts.max(axis=0)), ("MIN", hosts.min(axis=0))):
        refuse(not right.all() and (last == picked).all(), f"the buffers hold the {operation} of the hosts' sums, and "
               "not the sum of them")


def hierarchical_failure(message: str) -> str:
    """The error of a launch that sums over hosts, with a hint where a mistake is known."""
    if "outputShape" in message or "must be the same size" in message or "not divisible" in message:
        return (f"the buffer's length need not be a multiple of the ranks on a host: give reduce-scatter a whole that "
                f"is, filled up with zeros.\n{message}")
    return message


def predicted_ratio(got: Any, want: float, slips: Mapping[str, float]) -> float:
    """A predicted ratio of hierarchical to ring must be within 1 %; `slips` are what mistakes give, by sentence."""
    require(isinstance(got, (int, float)) and not isinstance(got, bool), "predict returns one number, the ratio")
    if abs(got / want - 1) <= PREDICTED:
        return want
    for sentence, value in slips.items():
        refuse(abs(got / value - 1) < 1e-3, f"the ratio is {short(got)}, and a run takes {short(want)}: {sentence}")
    refuse(abs(got * want - 1) < 1e-3, f"the ratio is {short(got)}, and a run takes {short(want)}: it is the "
                                       "hierarchical time over the ring's, not the other way round")
    refuse(True, f"the ratio is {short(got)}, and a run takes {short(want)}: count the steps of each phase, and what "
                 "passes through a card in each")
    return want


def shared_cards(got: Any, want: Collection[Collection[int]], at_once: Mapping[frozenset[int], bool]) -> None:
    """The groups of ranks that share a card; `at_once` says of each tried pair whether its messages overlapped."""
    require(isinstance(got, (list, tuple, set)) and all(isinstance(one, (list, tuple, set, frozenset)) for one in got),
            "shared_cards returns a list of groups, each a list or set of ranks")
    groups = [frozenset(one) for one in got]
    ranks = sorted(rank for group in groups for rank in group)
    everyone = sorted(rank for group in want for rank in group)
    refuse(len(set(ranks)) < len(ranks), "a rank is in two groups: who shares a card with a rank, shares it with all "
                                         "that share it")
    require(ranks == everyone, f"each of the ranks {listed(everyone)} is in one group; one that shares with nobody, in "
                               "a group of its own")
    place = {rank: group for group in groups for rank in group}
    card = {rank: frozenset(group) for group in want for rank in group}
    for pair, overlapped in at_once.items():
        a, b = sorted(pair)
        refuse(card[a] == card[b] and place[a] != place[b] and overlapped,
               f"ranks {a} and {b} are apart, and yet they sent at once more slowly than either alone")
        refuse(card[a] != card[b] and place[a] == place[b],
               f"ranks {a} and {b} are in one group, and each of their messages had a whole card: compare bytes per "
               "second, for messages differ in size")
    wrong = next((rank for rank in everyone if place[rank] != card[rank]), None)
    require(wrong is None, f"rank {wrong} shares with {listed(sorted(card.get(wrong or 0, ())))}: not every pair was "
                           "tried at once, but a shares with b, and b with c")
