"""This machine's GPUs and the versions of their software, without the machine's name."""
from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.machine import measured_on
from benchmarks.report import Table


@dataclass(frozen=True)
class Gpu:
    """One GPU as torch sees it, and so every rank."""

    name: str
    num_bytes: int
    capability: str


@dataclass(frozen=True)
class Machine:
    """What this machine has: `driver`, `cuda` and `nccl` are None if missing; `links` is nvidia-smi's table."""

    measured_on: str
    torch: str
    cuda: str | None
    nccl: str | None
    driver: str | None
    gpus: list[Gpu] = field(default_factory=list)
    links: str = ""

    def table(self) -> Table:
        """GPUs and versions."""
        gpus = [f"{gpu.name}, {gpu.num_bytes / 2**30:.0f} GB, compute capability {gpu.capability}" for gpu in self.gpus]
        rows = [(f"GPU {number}", gpu) for number, gpu in enumerate(gpus)] or [("GPUs", "none")]
        versions = {"driver": self.driver, "CUDA": self.cuda, "NCCL": self.nccl, "torch": self.torch}
        return Table("Machine", ("what", "which"), rows + [(name, value or "–") for name, value in versions.items()])

    @property
    def why_not(self) -> str:
        """One sentence: why no rank gets a GPU here."""
        if self.driver and not self.cuda:
            return f"An NVIDIA driver is here ({self.driver}), but torch {self.torch} was built without CUDA."
        if self.driver:
            return f"An NVIDIA driver is here ({self.driver}), but torch {self.torch} sees no GPU."
        return "There is no NVIDIA GPU here."


def find() -> dict[str, Any]:
    """This machine as plain data; it asks the driver, so it runs in a process that can be killed."""
    import torch
    gpus = [torch.cuda.get_device_properties(number) for number in range(torch.cuda.device_count())]
    found = [Gpu(gpu.name, gpu.total_memory, f"{gpu.major}.{gpu.minor}") for gpu in gpus]
    return asdict(Machine(measured_on(), torch.__version__, torch.version.cuda, _nccl(), _driver(), found,
                          _links() if len(found) > 1 else ""))


def rebuilt(data: dict[str, Any]) -> Machine:
    """A machine from its plain data."""
    return Machine(**{**data, "gpus": [Gpu(**gpu) for gpu in data["gpus"]]})


def _nccl() -> str | None:
    import torch
    import torch.distributed as dist
    return ".".join(map(str, torch.cuda.nccl.version())) if torch.version.cuda and dist.is_nccl_available() else None


def _driver() -> str | None:
    """The driver's version according to its kernel module, or else to nvidia-smi (WSL2 has no such file)."""
    try:
        found = re.search(r"^NVRM version:.*?\b(\d+\.\d+(?:\.\d+)?)\b",
                          Path("/proc/driver/nvidia/version").read_text("utf-8"), re.M)
    except OSError:
        found = None
    lines = _asked("--query-gpu=driver_version", "--format=csv,noheader").split()
    return found[1] if found else lines[0] if lines else None


def _links() -> str:
    """How the GPUs are connected, as nvidia-smi draws it."""
    return re.sub(r"\x1b\[[0-9;]*m", "", _asked("topo", "-m")).strip()


def _asked(*arguments: str) -> str:
    command = shutil.which("nvidia-smi")
    if not command:
        return ""
    try:
        answer = subprocess.run([command, *arguments], text=True, capture_output=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return answer.stdout if answer.returncode == 0 else ""
