"""L2: what of a machine will hurt a job, and what to do about it; facts come from `machine`."""
from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from book.doctor.machine import PORT, HostFacts
from book.words import agree

SMALL_SHM, FEW_FILES, SLOW_S = 1 << 30, 4096, 0.5
VIRTUAL = ("docker", "br-", "veth", "cni", "flannel", "cali", "virbr", "lxc")
LEAST_DRIVERS = {11: 450, 12: 525, 13: 580}  # by CUDA's major version
LEFT_OVER = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
SLOWS = {"CUDA_LAUNCH_BLOCKING": "every kernel then waits for its end, and nothing overlaps",
         "NCCL_P2P_DISABLE": "GPUs of this machine then talk through the host's memory",
         "NCCL_IB_DISABLE": "NCCL then goes through sockets instead of InfiniBand",
         "NCCL_SHM_DISABLE": "GPUs without direct access then talk through sockets"}


class Finding(NamedTuple):
    """What is wrong, and what to do."""

    what: str
    remedy: str


def findings(machine: HostFacts) -> Iterator[Finding]:
    """What will hurt, the gravest first; nothing for a machine on which all is well."""
    yield from _gpus(machine)
    yield from _memory(machine)
    yield from _network(machine)
    yield from _variables(machine)
    yield from _cores(machine)


def _gpus(machine: HostFacts) -> Iterator[Finding]:
    if machine.driver and not machine.cuda:
        yield Finding(f"torch {machine.torch} is a build without CUDA, and this machine has an NVIDIA driver",
                      "install the build that https://pytorch.org/get-started/locally names for your driver")
    elif machine.cuda and not machine.gpus and _is_too_old(machine.driver_version, machine.cuda):
        yield Finding(f"torch {machine.torch} is built for CUDA {machine.cuda}, which needs driver "
                      f"{least_driver(machine.cuda)} or later, and this machine has {machine.driver_version}",
                      "update the driver, or install a build of torch for an older CUDA; on cards for data centres the "
                      "package cuda-compat stands in for the driver's update")
    elif machine.cuda and machine.driver and not machine.gpus:
        yield Finding(f"torch {machine.torch} is built for CUDA {machine.cuda} and sees no GPU: the driver is older, "
                      "or CUDA_VISIBLE_DEVICES hides the GPUs", "compare with the version that nvidia-smi prints")
    if machine.nccl_found and machine.nccl and numbers(machine.nccl_found) < numbers(machine.nccl)[:3]:
        yield Finding(f"NCCL {machine.nccl_found} is loaded, and torch was built with {machine.nccl}: an older library "
                      "is found first", "take its folder out of LD_LIBRARY_PATH, and its file out of LD_PRELOAD")
    if machine.peers is not None and machine.peers < 1:
        yield Finding(f"{1 - machine.peers:.0%} of the pairs of GPUs can't read each other's memory: their messages go "
                      "through the host's", "nvidia-smi topo -m shows which; keep tensor parallelism among the others")


def least_driver(cuda: str) -> int:
    """The first driver, by its major version, that runs programs of a CUDA's major version (cudacompat)."""
    return LEAST_DRIVERS.get(numbers(cuda)[0], 0)


def _is_too_old(driver: str, cuda: str) -> bool:
    return bool(driver) and numbers(driver)[0] < least_driver(cuda)


def numbers(version: str) -> tuple[int, ...]:
    """A version's numbers, to compare them."""
    return tuple(int(part) for part in re.findall(r"\d+", version)) or (0,)


def _memory(machine: HostFacts) -> Iterator[Finding]:
    if machine.shm_bytes < SMALL_SHM:
        yield Finding(f"/dev/shm has {machine.shm_bytes / 2**20:.0f} MiB: NCCL and the workers of a DataLoader share "
                      "memory there, and die with a bus error when it is full",
                      "docker run --shm-size=8g, or in Kubernetes an emptyDir with medium: Memory at /dev/shm")
    if machine.infiniband and machine.locked_bytes is not None:
        yield Finding(f"a process may lock {machine.locked_bytes / 2**20:.0f} MiB of memory, and InfiniBand "
                      f"({', '.join(machine.infiniband)}) needs its buffers locked",
                      "ulimit -l unlimited, or docker run --ulimit memlock=-1")
    if machine.num_files is not None and machine.num_files < FEW_FILES:
        yield Finding(f"a process may have {machine.num_files} files open, and each pair of ranks and each worker of a "
                      "DataLoader takes some", f"ulimit -n {FEW_FILES}")


def _network(machine: HostFacts) -> Iterator[Finding]:
    if machine.lookup_s is None or machine.lookup_s > SLOW_S:
        took = "over 8 s" if machine.lookup_s is None else f"{machine.lookup_s:.1f} s"
        yield Finding(f"looking up the name of 127.0.0.1 takes {took}: torch does that when a rank joins, and all wait",
                      "put the addresses of the hosts into /etc/hosts, or mend the name server in /etc/resolv.conf")
    if "GLOO_SOCKET_IFNAME" in machine.variables:
        pass  # then gloo does not ask for the host's name
    elif not machine.address:
        yield Finding(f"the name of this host, {machine.host}, leads to no address: gloo can't find its interface",
                      f"add a line for {machine.host} to /etc/hosts, or set GLOO_SOCKET_IFNAME")
    elif machine.address.startswith("127.") and machine.interfaces:
        yield Finding(f"the name of this host, {machine.host}, leads to {machine.address}: ranks on other hosts would "
                      "be told to connect to themselves", "set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME to "
                      f"{' or '.join(machine.interfaces)}, or mend /etc/hosts")
    real = [name for name in machine.interfaces if not name.startswith(VIRTUAL)]
    if len(real) > 1 and "NCCL_SOCKET_IFNAME" not in machine.variables:
        yield Finding(f"this host has several networks ({', '.join(real)}), and each library chooses one by itself",
                      "for several hosts, name the one that they share: NCCL_SOCKET_IFNAME, GLOO_SOCKET_IFNAME")
    if machine.port_taken:
        yield Finding(f"port {PORT}, where torchrun meets by default, is in use: by a job of yours that did not end, "
                      "or by somebody else's",
                      f"ss -ltnp 'sport = {PORT}' shows whose; torchrun --standalone takes a free one")


def _variables(machine: HostFacts) -> Iterator[Finding]:
    left = [name for name in LEFT_OVER if name in machine.variables]
    if left:
        yield Finding(f"{', '.join(left)} {agree('is', left)} set in this shell: a program that is started without "
                      "torchrun takes itself for a rank and waits for the others", f"unset {' '.join(left)}")
    for name, why in SLOWS.items():
        if machine.variables.get(name, "0") != "0":
            yield Finding(f"{name}={machine.variables[name]} is set: {why}",
                          f"unset {name}, unless you are looking for a fault")
    if machine.variables.get("TORCH_FR_BUFFER_SIZE") == "0":
        yield Finding("TORCH_FR_BUFFER_SIZE=0 is set: a job that hangs leaves no dumps", "unset TORCH_FR_BUFFER_SIZE")


def _cores(machine: HostFacts) -> Iterator[Finding]:
    ranks = max(len(machine.gpus), 2)
    allowed = min(machine.cores, machine.quota or machine.cores)
    if allowed < ranks:
        yield Finding(f"{allowed:g} core{'s' * (allowed != 1)} for {ranks} ranks: each rank wants one to itself, and "
                      "the workers of a DataLoader want more",
                      "ask for more (docker run --cpus, --cpus-per-task of Slurm), or start fewer ranks")
