"""`lockstep doctor`: what this machine's ranks will stumble on."""
from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Sequence

from book.doctor import across
from book.doctor.ailments import ailments, cards_told, while_it_ran
from book.doctor.bandwidth import TimedAllReduce, measure, measure_as_rank
from book.doctor.cards import read_cards, watched
from book.doctor.findings import Finding, findings
from book.doctor.machine import HostFacts, this_machine
from book.words import counted

REACHED = "lockstep/doctor/reached"


def main(arguments: list[str] | None = None) -> int:
    """Say what this machine has and what will hurt; the exit status is 1 if something will, under torchrun 0."""
    options = _parser().parse_args(arguments)
    if "TORCHELASTIC_RUN_ID" in os.environ:
        return _as_rank(options.quick)
    if options.ranks < 0 or options.ranks == 1:
        print(f"error: all-reduces take at least 2 ranks, not {options.ranks}", file=sys.stderr)
        return 2
    machine, cards = this_machine(), read_cards()
    print("\n".join(told(machine)))
    if machine.driver or cards.cards:
        print("\n".join(cards_told(cards)))
    found = [*findings(machine), *ailments(cards)]
    _print_findings(found)
    if not options.quick:
        num_ranks = options.ranks or max(len(machine.gpus), 2)
        with watched() as seen:
            timed = measure(num_ranks)
        print("\n".join(measured_told(num_ranks, *timed)))
        _print_findings(ran := [*while_it_ran(seen, cards.cards)], len(found))
        found += ran
    return 1 if found else 0


def _as_rank(quick: bool) -> int:
    """One rank of torchrun's: the first of each host compares hosts, host 0 prints, and all of them all-reduce."""
    number, num_hosts = int(os.environ["GROUP_RANK"]), int(os.environ["GROUP_WORLD_SIZE"])
    store, is_first, rank = across.store_of_agents(), os.environ["LOCAL_RANK"] == "0", int(os.environ["RANK"])
    if is_first:
        found = across.meet(store, number, num_hosts)
        if rank == 0:
            print("\n".join(_hosts_told(found)))
            _print_findings([*across.differences(found), *across.own_findings(found)])
            store.set(REACHED, "" if found.unreached else "yes")
    if not quick and store.get(REACHED):
        timed = measure_as_rank()
        if rank == 0:
            print("\n".join(measured_told(int(os.environ["WORLD_SIZE"]), *timed)))
    return 0


def _hosts_told(found: across.Together) -> Iterator[str]:
    """Each host in a few lines."""
    for number, said in enumerate(found.hosts):
        *most, networks = told(said.facts)
        yield f"host {number}, {networks}; gloo tells the others {said.address}"
        yield from (f"  {line}" for line in most)
        if said.facts.driver or said.cards.cards:
            yield from (f"  {line}" for line in cards_told(said.cards))


def _print_findings(found: Sequence[Finding], before: int | None = None) -> None:
    """What was found, numbered on from `before`; that there is nothing, unless others came before."""
    for number, finding in enumerate(found, (before or 0) + 1):
        print(f"{number}. {finding.what}.\n   Remedy: {finding.remedy}.")
    if not found and before is None:
        print("Nothing here that ranks are known to stumble on.")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "lockstep doctor", description="Looks at GPUs, shared memory, limits, names, networks and variables of this "
                                       "machine, as this shell sees them, and times all-reduces between its ranks. Run "
                                       "it on each host, in the job's container; or under torchrun, "
                                       "`torchrun ... -m book.doctor`, which compares the hosts.")
    parser.add_argument("--quick", action="store_true", help="leave out the all-reduces")
    parser.add_argument("--ranks", type=int, default=0, help="of the all-reduces; default: one for each GPU, else 2")
    return parser


def told(machine: HostFacts) -> Iterator[str]:
    """What the machine has, in a few lines."""
    yield f"torch {machine.torch}" + (f", CUDA {machine.cuda}" if machine.cuda else ", no CUDA") + (
        f", NCCL {machine.nccl}" if machine.nccl else "")
    yield f"{counted(len(machine.gpus), 'GPU')}: {', '.join(sorted(set(machine.gpus)))}" if machine.gpus else (
        "no GPU: ranks talk through gloo")
    yield (f"{counted(machine.cores, 'core')}, {machine.free_bytes / 2**30:.0f} GiB of memory free, "
           f"{machine.shm_bytes / 2**30:.1f} GiB in /dev/shm")
    networks = ", ".join(f"{name} {address}" for name, address in machine.interfaces.items()) or "no network"
    infiniband = f", InfiniBand {', '.join(machine.infiniband)}" if machine.infiniband else ""
    yield f"{machine.host}: {networks}{infiniband}"


def measured_told(num_ranks: int, backend: str, found: Sequence[TimedAllReduce]) -> Iterator[str]:
    """All-reduces between ranks."""
    yield (f"all-reduce between {num_ranks} ranks on {backend}, the fastest of ten; bus bandwidth as nccl-tests "
           "counts it")
    for one in found:
        yield f"  {one.num_bytes:>12,} bytes {one.seconds * 1e6:>10,.0f} µs {one.bus_bytes_per_s / 1e9:>8.2f} GB/s"


if __name__ == "__main__":
    sys.exit(main())
