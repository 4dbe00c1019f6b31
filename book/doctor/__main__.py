"""`lockstep doctor`: what this machine's ranks will stumble on."""
from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator

from book.doctor.bandwidth import measure
from book.doctor.findings import findings
from book.doctor.machine import HostFacts, this_machine
from book.words import counted


def main(arguments: list[str] | None = None) -> int:
    """Say what this machine has and what will hurt; the exit status is 1 if something will."""
    options = _parser().parse_args(arguments)
    if options.ranks < 0 or options.ranks == 1:
        print(f"error: all-reduces take at least 2 ranks, not {options.ranks}", file=sys.stderr)
        return 2
    machine = this_machine()
    print("\n".join(told(machine)))
    found = list(findings(machine))
    for number, finding in enumerate(found, 1):
        print(f"{number}. {finding.what}.\n   Remedy: {finding.remedy}.")
    if not found:
        print("Nothing here that ranks are known to stumble on.")
    if not options.quick:
        print("\n".join(measured_told(options.ranks or max(len(machine.gpus), 2))))
    return 1 if found else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "lockstep doctor", description="Looks at GPUs, shared memory, limits, names, networks and variables of this "
                                       "machine, as this shell sees them, and times all-reduces between its ranks. Run "
                                       "it on each host, in the job's container.")
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


def measured_told(num_ranks: int) -> Iterator[str]:
    """All-reduces between this machine's ranks."""
    backend, found = measure(num_ranks)
    yield (f"all-reduce between {num_ranks} ranks on {backend}, the fastest of ten; bus bandwidth as nccl-tests "
           "counts it")
    for one in found:
        yield f"  {one.num_bytes:>12,} bytes {one.seconds * 1e6:>10,.0f} µs {one.bus_bytes_per_s / 1e9:>8.2f} GB/s"


if __name__ == "__main__":
    sys.exit(main())
