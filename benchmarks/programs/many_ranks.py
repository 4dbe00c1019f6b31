"""Simulate one thing of many ranks in this process; prints JSON: its CPU seconds, and the process's memory in bytes."""
from __future__ import annotations

import json
import resource
import sys
import time

from benchmarks.simulation import SIMULATED


def main(what: str, world_size: int) -> None:
    """Print the CPU seconds of the simulation alone, and the most memory of this process before it and after it."""
    before, start_s = peak_bytes(), time.process_time()
    SIMULATED[what](world_size)
    print(json.dumps({"cpu_s": time.process_time() - start_s, "before_bytes": before, "peak_bytes": peak_bytes()}))


def peak_bytes() -> int:
    """The most memory that this process has had so far; the kernel counts in KB, on macOS in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
