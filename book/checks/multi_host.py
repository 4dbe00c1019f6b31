"""L3, lab 11: variables of ranks on several hosts, a measured link, what crosses between hosts, who shares a card."""
from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from book.checks.formula import Formula
from book.launch import LaunchError
from book.checks.verdict import CheckFailed, flat, refuse, require, short, unmet
from book.trace import Trace
from book.words import listed

PROMISED = 0.25  # how far off a measured link may be
PREDICTED = 0.01  # how far off a predicted ratio may be
SLIPPED = 1e-3  # how far off it may be from the one that a mistake gives
VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")


def environments(environment: Callable[[int, int], Any], addresses: Sequence[str], ranks_per_host: int, port: int,
                 first: int = 0) -> list[Mapping[str, str]]:
    """`environment(host, local rank)` must be the variables that a launcher sets; returns those of all ranks, by rank.

    `addresses` has one for each host. Ranks are numbered host by host from host `first` on: forwards from host 0, or
    backwards from the last one.
    """
    num_hosts, found = len(addresses), {}
    every = {(host, local): environment(host, local) for host in range(num_hosts) for local in range(ranks_per_host)}
    for (host, local), got in every.items():
        where = f"host {host}, local rank {local}"
        require(isinstance(got, Mapping) and set(got) == set(VARIABLES),
                f"{where}: return a dict with the keys {listed(VARIABLES)}, and no others")
        odd = [name for name in VARIABLES if not isinstance(got[name], str)]
        refuse(odd, f"{where}: not a string: {listed(odd)}. os.environ takes only strings")
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
           f"{where}WORLD_SIZE is {ranks_per_host}, the number of ranks on one host: each host would train alone")
    refuse(got["WORLD_SIZE"] == str(num_hosts) and ranks_per_host > 1,
           f"{where}WORLD_SIZE is {num_hosts}, the number of hosts, but it must be the number of ranks")
    refuse(got["RANK"] == str(local) != str(rank),
           f"{where}RANK is {local}, the local rank, but another host already has the rank with that number")
    refuse(in_turn and got["RANK"] != str(rank),
           f"{where}RANK is {got['RANK']}: you deal ranks out to the hosts in turn, so neighbours in a ring are never "
           "on the same host. Number all ranks of one host before those of the next")
    refuse(got["LOCAL_RANK"] == str(rank) != str(local),
           f"{where}LOCAL_RANK is {rank}, the rank in the world, but it chooses the GPU, and this host has GPUs 0 to "
           f"{ranks_per_host - 1}")
    refuse(got["LOCAL_WORLD_SIZE"] == str(world_size) and num_hosts > 1,
           f"{where}LOCAL_WORLD_SIZE is {world_size}, the number of all ranks, but it counts only those on this host")
    refuse(got["GROUP_RANK"] == str(host) != str(group),
           f"{where}GROUP_RANK is {host}, but here hosts are counted backwards, from the last one")
    refuse(got["GROUP_RANK"] == str(local) != str(group),
           f"{where}GROUP_RANK is {local}, the local rank, but it is the host's number, the same for all its ranks")
    require(got["RANK"] == str(rank), f"{where}RANK is {got['RANK']!r}, but it should be {str(rank)!r}: the ranks "
            f"of this host start at {group} * {ranks_per_host}")
    want = {"RANK": rank, "LOCAL_RANK": local, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": ranks_per_host,
            "GROUP_RANK": group}
    for name, value in want.items():
        require(got[name] == str(value), f"{where}{name} is {got[name]!r}, but it should be {str(value)!r}")


def _meeting(got: Mapping[str, str], where: str, addresses: Sequence[str], first: int, host: int, port: int) -> None:
    """The address and port at which a rank looks for the store."""
    address, master = got["MASTER_ADDR"], addresses[first]
    refuse(address in ("localhost", "127.0.0.1") and address not in addresses,
           f"{where}: MASTER_ADDR is {address}, which on every host means that host itself, but only rank 0's host, "
           f"{master}, has the store")
    refuse(address != master and master in address, f"{where}: MASTER_ADDR is {address!r}, but it should be only the "
           f"address, {master}, without a scheme or a port")
    refuse(address == addresses[host] != master,
           f"{where}: MASTER_ADDR is this host's own address, but rank 0 opens the store on {master}, and all ranks "
           "need that address")
    require(address == master, f"{where}: MASTER_ADDR is {address!r}, but rank 0 opens the store on {master}")
    require(got["MASTER_PORT"] == str(port),
            f"{where}: MASTER_PORT is {got['MASTER_PORT']!r}, but all ranks need the same port, {port}")


def measured_link(got: Any, latency_s: float, bytes_per_s: float) -> None:
    """The measured (latency, bytes per second) must be within 25 % of the link's own."""
    require(isinstance(got, tuple) and len(got) == 2 and all(isinstance(x, (int, float)) for x in got),
            "measure must return two numbers: the latency in seconds, and bytes per second")
    any_of, twice = float("nan"), 2 * latency_s
    pinged = "a ping is two messages, one there and one back"
    first = "Leave out the first ping, which opens the connection, and take the fastest of several: some are disturbed"
    formula = Formula((latency_s, bytes_per_s), [
        ((twice, bytes_per_s / 2), f"the latency is twice and the bandwidth half the link's: {pinged}"),
        ((bytes_per_s, latency_s), "the two numbers are swapped: return the latency first"),
        *(((any_of, factor * bytes_per_s), f"the bandwidth is in {unit} per second: return bytes per second")
          for factor, unit in ((1e-6, "megabytes"), (8e-6, "megabits"))),
        ((1e3 * latency_s, any_of), "the latency is in milliseconds: return seconds"),
        ((any_of, 8 * bytes_per_s), "the bandwidth is eight times the link's: return bytes per second, not bits"),
        ((any_of, 1 / bytes_per_s), "you return seconds per byte: take its reciprocal"),
        ((any_of, 2 * bytes_per_s), "the bandwidth is twice the link's: did you count the bytes of both directions, "
         "but the time of only one?"),
        ((any_of, bytes_per_s / 2), f"the bandwidth is half the link's: {pinged}"),
        ((twice, any_of), "the latency is twice the link's: a ping is two messages, and each of them pays the latency. "
         "Or did you take the mean of all times? The first ping opens the connection, and some are disturbed"),
        ((latency_s / 2, bytes_per_s), "the latency is half the link's: did you halve a time twice?")], _near)
    refuse(said := formula.explain(got), said)
    latency, speed = got
    require(_near([speed], [bytes_per_s]), f"the bandwidth is {short(speed / bytes_per_s)} times the link's. Compare "
            f"the times of two very different sizes. {first}")
    require(_near([latency], [latency_s]), f"the latency is {short(latency / latency_s)} times the link's. It is the "
            f"time that remains after subtracting that of the bytes. {first}")


def _near(got: Sequence[float], values: Sequence[float]) -> bool:
    """Whether these are about the values; where a value is nan, anything is."""
    return all(np.isnan(value) or abs(own / value - 1) <= PROMISED for own, value in zip(got, values))


def crossing_bytes(trace: Trace, ranks_per_host: int, num_bytes: int) -> int:
    """The ranks of a host may together send no more than one buffer across; returns the bytes that all hosts send.

    What counts is the size of each buffer that a rank gives to a collective whose ranks are on several hosts.
    """
    world_size = trace.world_size
    across = [0.0] * (world_size // ranks_per_host)
    scattered: Counter[int] = Counter()  # the all-gather that follows a reduce-scatter is the second half of a sum
    most = num_bytes + 8 * world_size  # padding for each rank and for each host
    for event in trace.of_kind("collective"):
        group = event.group or ()
        if len({rank // ranks_per_host for rank in group}) > 1:
            refuse(len(group) == world_size and ranks_per_host > 1,
                   f"{event.op} runs over all ranks, and the library's own all-reduce does not know here which of them "
                                             "share a host: use inside and across")
            sent_bytes = event.num_bytes or 0
            if event.op == "reduce_scatter":
                scattered[event.rank] += sent_bytes
            if event.op == "all_gather":
                scattered[event.rank] -= sent_bytes
                refuse(scattered[event.rank] < 0, "an all-gather across hosts sends every buffer to every host, where "
                                                  "an all-reduce would send only sums")
            else:
                across[event.rank // ranks_per_host] += sent_bytes
    for host, sent in enumerate(across):
        refuse(sent >= ranks_per_host * num_bytes and ranks_per_host > 1,
               f"the ranks of host {host} give {sent:.0f} bytes to collectives across hosts, that is {ranks_per_host} "
               "whole buffers: each rank should give only its share of the host's sum")
        require(sent <= most, f"the ranks of host {host} give {sent:.0f} bytes to collectives across hosts, but one "
                              f"buffer has only {num_bytes}: what is sent twice?")
    return round(sum(across))


def handed_out(before: Sequence[Any], after: Sequence[Any], ranks_per_host: int) -> None:
    """The buffers, by rank, must not hold the sum only in each rank's own share or without the last elements, nor the
    MAX or MIN of hosts' sums."""
    first, last = np.stack([flat(b) for b in before]), np.stack([flat(b) for b in after])
    if first.shape != last.shape or ranks_per_host == 1 or len(first) == ranks_per_host:
        return
    right, share = last == first.sum(axis=0), -(-first.shape[1] // ranks_per_host)
    own = np.stack([np.arange(first.shape[1]) // share == rank % ranks_per_host for rank in range(len(first))])
    refuse(not right.all() and right[own].all() and (last == first)[~own].all(), "each rank has the sum in its own "
           "share, but its own numbers elsewhere: an all-gather inside brings the other shares")
    rest = first.shape[1] % ranks_per_host
    refuse(rest and right[:, :-rest].all() and not right[:, -rest:].any(), f"the last {rest} of {first.shape[1]} "
           f"elements were left out: {ranks_per_host} ranks of a host can't have equal shares of so many, so pad the "
           "buffer with zeros before the reduce-scatter")
    hosts = first.reshape(-1, ranks_per_host, first.shape[1]).sum(axis=1)
    for operation, picked in (("MAX", hosts.max(axis=0)), ("MIN", hosts.min(axis=0))):
        refuse(not right.all() and (last == picked).all(), f"the buffers hold the {operation} of the hosts' sums, "
               "not their sum")


def hierarchical_failure(error: LaunchError) -> str:
    """The error of a launch that sums over hosts, with a hint if it shows a known mistake."""
    message = str(error)
    if "outputShape" in message or "must be the same size" in message or "not divisible" in message:
        return ("the buffer's length need not be a multiple of the number of ranks on a host: pad it with zeros before "
                f"the reduce-scatter.\n{message}")
    if "invalid tensor size" in message:
        return ("an all-gather takes a tensor for the parts of all ranks of its group, then the rank's own part: is "
                f"the group that of this host, and are the two in this order?\n{message}")
    return unmet(error, ": inside is the group of this host's ranks, across that of the ranks with this local rank")


def predicted_ratio(got: Any, want: float, slips: Mapping[str, float]) -> float:
    """A predicted ratio of hierarchical to ring must be within 1 %; `slips` maps a mistake's sentence to its ratio."""
    require(isinstance(got, (int, float)) and not isinstance(got, bool), "predict must return one number, the ratio")
    if abs(got / want - 1) <= PREDICTED:
        return want
    formula = Formula(want, [
        *((value, sentence) for sentence, value in slips.items()),
        (1 / want, "divide the hierarchical time by the ring's, not the other way round")],
        near=lambda one, other: abs(one / other - 1) < SLIPPED)
    why = formula.explain(got, "count the steps of each phase, and what passes through a card in each step")
    raise CheckFailed(f"the ratio is {short(got)}, but the runs give {short(want)}: {why}")


def shared_cards(got: Any, want: Collection[Collection[int]], at_once: Mapping[frozenset[int], bool]) -> None:
    """`got` must be the groups of ranks that share a card; `at_once` says for each tried pair whether its messages
    overlapped."""
    require(isinstance(got, (list, tuple, set)) and all(isinstance(one, (list, tuple, set, frozenset)) for one in got),
            "shared_cards must return a list of groups, each a list or set of ranks")
    groups = [frozenset(one) for one in got]
    ranks = sorted(rank for group in groups for rank in group)
    everyone = sorted(rank for group in want for rank in group)
    refuse(len(set(ranks)) < len(ranks), "a rank is in two groups: two ranks that share a card with the same rank also "
                                         "share it with each other")
    require(ranks == everyone, f"each of the ranks {listed(everyone)} must be in one group; a rank that shares with "
                               "nobody is a group of its own")
    place = {rank: group for group in groups for rank in group}
    card = {rank: frozenset(group) for group in want for rank in group}
    apart = [place[a] != place[b] for a, b in at_once if card[a] != card[b]]
    in_turn = [sorted(pair) for pair, overlapped in at_once.items() if not overlapped]
    for pair, overlapped in at_once.items():
        a, b = sorted(pair)
        refuse(card[a] == card[b] and place[a] != place[b] and overlapped,
               f"ranks {a} and {b} are in different groups, but when both sent at once, each was slower than when it "
               "sent alone")
        refuse(card[a] != card[b] and place[a] == place[b],
               f"ranks {a} and {b} are in one group, but each of their messages had a whole card: compare bytes per "
               "second, since messages differ in size"
               + ". Two messages that are equally fast may both have a whole card: compare each with the fastest of "
               "the trace" * (not any(apart))
               + ". Or does one of two send only when the other is done? Such a step does not tell who shares a card"
               * (set(groups) == _joined(want, in_turn)))
    wrong = next((rank for rank in everyone if place[rank] != card[rank]), None)
    require(wrong is None, f"rank {wrong} belongs in the group of ranks {listed(sorted(card.get(wrong or 0, ())))}. "
                           "Not every pair was tried at once: if a shares with b, and b with c, then a shares with c")


def _joined(groups: Collection[Collection[int]], pairs: Iterable[Collection[int]]) -> set[frozenset[int]]:
    """The groups after those that hold the members of a pair have been joined, pair by pair."""
    found = set(map(frozenset, groups))
    for pair in pairs:
        touched = {group for group in found if not group.isdisjoint(pair)}
        found = found - touched | {frozenset[int]().union(*touched)}
    return found
