"""L2: what a machine has that ranks depend on, read from the system and from torch."""
from __future__ import annotations

import ctypes
import os
import re
import resource
import shutil
import socket
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as TooLate
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

PORT = 29500  # torchrun's own, unless told otherwise
WAIT_S = 8.0  # for a name server: most are given up after 5 s
VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "CUDA_LAUNCH_BLOCKING",
             "NCCL_P2P_DISABLE", "NCCL_IB_DISABLE", "NCCL_SHM_DISABLE", "NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME",
             "TORCH_FR_BUFFER_SIZE")


@dataclass(frozen=True)
class HostFacts:
    """Bytes, seconds and counts; None where something is unlimited or can't be known.

    `lookup_s` is how long the name of 127.0.0.1 takes to look up, which torch does when a rank joins. `peers` is the
    share of pairs of GPUs that read each other's memory directly. `nccl` is what torch was built with, `nccl_found` the
    library that is loaded; "" where there is none.
    """

    torch: str
    cuda: str | None
    driver: bool
    gpus: tuple[str, ...]
    nccl: str
    peers: float | None
    shm_bytes: int
    locked_bytes: int | None
    num_files: int | None
    cores: int
    quota: float | None
    free_bytes: int
    infiniband: tuple[str, ...]
    host: str
    address: str
    lookup_s: float | None
    interfaces: Mapping[str, str]
    port_taken: bool
    variables: Mapping[str, str]
    driver_version: str = ""
    nccl_found: str = ""


def this_machine() -> HostFacts:
    """What this machine has, as this process sees it: in a container, what the container may use."""
    host = socket.gethostname()
    address, _ = _timed(lambda: socket.gethostbyname(host))
    _, lookup_s = _timed(lambda: socket.getnameinfo(("127.0.0.1", 0), 0)[0])
    gpus = _gpus()
    return HostFacts(
        torch.__version__, torch.version.cuda, Path("/proc/driver/nvidia/version").exists(), gpus,
        ".".join(map(str, torch.cuda.nccl.version())) if gpus else "", _peers(len(gpus)),
        shutil.disk_usage("/dev/shm").total if Path("/dev/shm").exists() else 0,
        _limit(resource.RLIMIT_MEMLOCK), _limit(resource.RLIMIT_NOFILE), _cores(), _quota(),
        psutil.virtual_memory().available, _infiniband(), host, address, lookup_s, _interfaces(), _taken(PORT),
        {name: os.environ[name] for name in VARIABLES if name in os.environ},
        _driver_version(), _nccl_found() if torch.version.cuda else "")


def _gpus() -> tuple[str, ...]:
    """The names of the GPUs that torch can use: where its CUDA does not start it may count some, and has none."""
    try:
        return tuple(torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count()))
    except (RuntimeError, AssertionError):
        return ()


def _driver_version() -> str:
    """The version of NVIDIA's driver, as the system has it."""
    try:
        found = re.search(r"Module +(?:for \S+ +)?([\d.]+)", Path("/proc/driver/nvidia/version").read_text())
        return found[1] if found else ""
    except OSError:
        return ""


def _nccl_found() -> str:
    """The version of the NCCL that a process with torch has loaded: another one may come first in LD_LIBRARY_PATH."""
    number = ctypes.c_int()
    try:
        ctypes.CDLL("libnccl.so.2").ncclGetVersion(ctypes.byref(number))
    except (OSError, AttributeError):
        return ""
    major, rest = divmod(number.value, 10_000 if number.value >= 10_000 else 1000)
    return f"{major}.{rest // 100}.{rest % 100}"


def _timed(look_up: Callable[[], object]) -> tuple[str, float | None]:
    """What a lookup says, "" if nothing, and its seconds; None if it had not ended after WAIT_S."""
    pool, start_s = ThreadPoolExecutor(1), time.monotonic()
    future = pool.submit(look_up)
    try:
        return str(future.result(WAIT_S)), time.monotonic() - start_s
    except TooLate:
        return "", None
    except OSError:
        return "", time.monotonic() - start_s
    finally:
        pool.shutdown(wait=False)


def _peers(num_gpus: int) -> float | None:
    pairs = [(one, other) for one in range(num_gpus) for other in range(num_gpus) if one != other]
    return sum(torch.cuda.can_device_access_peer(*pair) for pair in pairs) / len(pairs) if pairs else None


def _limit(what: int) -> int | None:
    soft, _ = resource.getrlimit(what)
    return None if soft == resource.RLIM_INFINITY else soft


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _quota() -> float | None:
    """Cores that a control group allows, as `docker run --cpus` sets it."""
    try:
        limit, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return None if limit == "max" else int(limit) / int(period)
    except (OSError, ValueError):
        return None


def _infiniband() -> tuple[str, ...]:
    folder = Path("/sys/class/infiniband")
    return tuple(sorted(one.name for one in folder.iterdir())) if folder.exists() else ()


def _interfaces() -> dict[str, str]:
    """The network interfaces that are up and their IPv4 addresses, without the loopback."""
    up = {name for name, state in psutil.net_if_stats().items() if state.isup}
    return {name: one.address for name, found in psutil.net_if_addrs().items() for one in found
            if name in up and one.family == socket.AF_INET and not one.address.startswith("127.")}


def _taken(port: int) -> bool:
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(("127.0.0.1", port))
        except OSError:
            return True
    return False
