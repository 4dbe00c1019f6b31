"""L2: what the hosts of a job stumble on together: `torchrun ... -m book.doctor` compares them.

The first rank of each host looks at its host, and all of them talk through the store of torchrun's agents: that works
also where ranks can't reach each other.
"""
from __future__ import annotations

import os
import pickle
import platform
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import replace
from datetime import timedelta
from typing import Any, NamedTuple

from book.doctor.ailments import ailments
from book.doctor.cards import Cards, read_cards
from book.doctor.findings import LEFT_OVER, Finding, findings
from book.doctor.machine import HostFacts, this_machine
from book.words import alike, listed

GLOO = "GLOO_SOCKET_IFNAME"
STORE_LIMIT_S, REACH_S, NUM_ASKED = 60.0, 3.0, 10
SKEW_S = 0.1  # between clocks of hosts
IMAGE = "the same image or environment on all hosts"


class HostSaid(NamedTuple):
    """What a host says of itself, and where its ranks can be reached: the address that gloo tells the others."""

    facts: HostFacts
    cards: Cards
    python: str
    address: str
    port: int
    token: bytes  # which it sends to whoever connects


class Together(NamedTuple):
    """What hosts found out about one another, by their numbers.

    `ahead_s` is how far each clock is ahead of host 0's, with how wrong that may be; `unreached` are pairs of which the
    first can't connect to the second.
    """

    hosts: tuple[HostSaid, ...]
    ahead_s: tuple[tuple[float, float], ...]
    unreached: tuple[tuple[int, int], ...]


def meet(store: Any, host: int, num_hosts: int, clock: Callable[[], float] = time.time) -> Together:
    """Compare this host with the others, over a store that each host calls this with."""
    facts = this_machine()
    with closing(socket.create_server(("", 0))) as door:
        token = secrets.token_bytes(16)
        threading.Thread(target=_answer, args=(door, token), daemon=True).start()
        own = HostSaid(facts, read_cards(), platform.python_version(), chosen_address(facts), door.getsockname()[1],
                       token)
        hosts = _gathered(store, "said", host, num_hosts, own)
        ahead_s = _ahead_s(store, host, num_hosts, clock)
        with ThreadPoolExecutor(num_hosts) as together:  # a firewall that drops packets takes REACH_S for each
            reached = [*together.map(_reaches, hosts)]
        missed = [(host, number) for number, there in enumerate(reached) if number != host and not there]
        unreached = _gathered(store, "unreached", host, num_hosts, missed)  # the doors stay open until all have tried
        with suppress(OSError):
            door.shutdown(socket.SHUT_RDWR)  # or its thread would wait for guests for ever
    return Together(tuple(hosts), ahead_s, tuple(pair for pairs in unreached for pair in pairs))


def chosen_address(facts: HostFacts) -> str:
    """What gloo tells other ranks: the address of the interface that is asked for, or that of the host's name."""
    asked = facts.variables.get(GLOO, "").split(",")[0]
    return facts.interfaces.get(asked, "127.0.0.1") if asked else facts.address or "127.0.0.1"


def _answer(door: socket.socket, token: bytes) -> None:
    while True:
        try:
            guest, _ = door.accept()
        except OSError:  # the door has been closed
            return
        with guest, suppress(OSError):  # a guest may leave before it has heard
            guest.sendall(token)


def _reaches(other: HostSaid) -> bool:
    """Whether this host can connect to another one, and to no other in its place."""
    try:
        with socket.create_connection((other.address, other.port), REACH_S) as line:
            return line.recv(len(other.token), socket.MSG_WAITALL) == other.token
    except OSError:
        return False


def _gathered(store: Any, what: str, host: int, num_hosts: int, own: Any) -> list[Any]:
    """What all hosts have to say; as pickles, as torch's own collectives of objects are."""
    store.set(f"lockstep/doctor/{what}/{host}", pickle.dumps(own))
    return [pickle.loads(store.get(f"lockstep/doctor/{what}/{number}")) for number in range(num_hosts)]


def _ahead_s(store: Any, host: int, num_hosts: int, clock: Callable[[], float]) -> tuple[tuple[float, float], ...]:
    """How far each host's clock is ahead of host 0's; only host 0 knows. Of several questions the fastest counts."""
    found = [(0.0, 0.0)]
    for other in range(1, num_hosts):
        tries = [_ask(store, f"lockstep/doctor/clock/{other}/{number}", host, other, clock)
                 for number in range(NUM_ASKED)]
        found.append(min(tries, key=lambda one: one[1]))
    return tuple(found)


def _ask(store: Any, key: str, host: int, other: int, clock: Callable[[], float]) -> tuple[float, float]:
    if host == other:
        store.get(f"{key}/asked")
        store.set(f"{key}/answer", repr(clock()))
    if host:
        return 0.0, 0.0
    before_s = clock()
    store.set(f"{key}/asked", "")
    then_s, after_s = float(store.get(f"{key}/answer")), clock()
    return then_s - (before_s + after_s) / 2, (after_s - before_s) / 2


def differences(found: Together) -> Iterator[Finding]:
    """What hosts have that does not fit together, the gravest first."""
    for one, other in found.unreached:
        address = found.hosts[other].address
        yield Finding(f"{name(found, one)} can't reach {name(found, other)} at {address}, which gloo's ranks tell "
                      "the others there: all would wait until the time is up",
                      f"set {GLOO} and NCCL_SOCKET_IFNAME to the interface that the hosts share, and open the ports "
                      "between them in the firewall")
    for what, of in _compared(found.hosts).items():
        if len(set(of)) > 1:
            yield Finding(f"hosts differ in {what}: {_by_host(found, of)}", IMAGE)
    for variable in sorted({key for said in found.hosts for key in said.facts.variables if key not in LEFT_OVER}):
        values = [said.facts.variables.get(variable, "not set") for said in found.hosts]
        if len(set(values)) > 1:
            yield Finding(f"hosts differ in {variable}: {_by_host(found, values)}", "set it alike on all hosts")
    for number, (ahead_s, error_s) in enumerate(found.ahead_s):
        if abs(ahead_s) > SKEW_S + error_s:
            way = "ahead of" if ahead_s > 0 else "behind"
            yield Finding(f"the clock of {name(found, number)} is {abs(ahead_s):.2f} s {way} host 0's: their logs and "
                          "dumps can't be put in order by time", "let chrony or ntpd set the clocks")


def _compared(hosts: Sequence[HostSaid]) -> Mapping[str, list[str]]:
    facts = [said.facts for said in hosts]
    return {"Python": [said.python for said in hosts], "torch": [one.torch for one in facts],
            "NCCL": [one.nccl_found or one.nccl or "none" for one in facts],
            "the driver": [one.driver_version or "none" for one in facts],
            "GPUs": [f"{len(one.gpus)} {listed(sorted(set(one.gpus)))}".strip() for one in facts]}


def name(found: Together, number: int) -> str:
    """A host as sentences name it."""
    return f"host {number} ({found.hosts[number].facts.host})"


def _by_host(found: Together, values: Sequence[str]) -> str:
    return "; ".join(f"{value} on {name(found, number)}" for number, value in enumerate(values))


def own_findings(found: Together) -> Iterator[Finding]:
    """What hosts have by themselves, with their names; what torchrun has set there and where it meets is no fault."""
    def of(said: HostSaid) -> Iterator[Finding]:
        variables = {key: value for key, value in said.facts.variables.items() if key not in LEFT_OVER}
        yield from findings(replace(said.facts, port_taken=False, variables=variables))
        yield from ailments(said.cards)

    every = alike((number, one) for number, said in enumerate(found.hosts) for one in of(said))
    for one, hosts in every.items():
        yield Finding(f"{listed(name(found, number) for number in hosts)}: {one.what}", one.remedy)


def store_of_agents() -> Any:
    """The store at which torchrun's agents have met."""
    from torch.distributed import TCPStore
    return TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False,
                    timeout=timedelta(seconds=STORE_LIMIT_S))
