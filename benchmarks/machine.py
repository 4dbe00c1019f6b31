"""The machine that a benchmark ran on, without its name."""
from __future__ import annotations

import importlib.metadata
import os
import platform
from datetime import datetime, timezone
from pathlib import Path


def measured_on() -> str:
    """One sentence: the date, cores, processor, memory, and the versions of Python and torch."""
    return (f"Measured on {datetime.now(timezone.utc):%Y-%m-%d} with {_num_cores()} cores of {_processor()}, "
            f"{_memory()}{platform.system()}, Python {platform.python_version()}, "
            f"torch {importlib.metadata.version('torch')}.")


def _num_cores() -> int:
    """The cores that this process may use: in a container fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _processor() -> str:
    """The processor's model if Linux tells it, else its architecture."""
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
    except OSError:
        lines = []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.processor() or platform.machine()


def _memory() -> str:
    if "SC_PHYS_PAGES" not in getattr(os, "sysconf_names", {}):
        return ""
    return f"{os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE') / 2**30:.0f} GB of memory, "
