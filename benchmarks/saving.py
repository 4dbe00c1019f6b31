"""A checkpoint on the network of the all-reduces: python -m benchmarks.saving. Needs Linux, root and iproute2.

Three hosts with cards of 80 Mbit/s train, and one of them sends a checkpoint meanwhile: not at all, as fast as it can,
and at a fifth of its card's rate. Prints what `lockstep run` says of each job.
"""
from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.process import ROOT
from book.hosts import Hosts
from book.job import told
from book.look.runs import FILE, JobRun, read_run

BITS_PER_S, NUM_HOSTS, LIMIT_S = 80_000_000, 3, 30
PROGRAM = str(ROOT / "examples" / "train_and_save.py")


def jobs(storage: str) -> dict[str, list[str]]:
    """The arguments of each job."""
    return {"nothing is saved": [], "saved as fast as it goes": ["--storage", storage],
            "saved at 2 MB/s": ["--storage", storage, "--most-bytes-per-s", "2e6"]}


def measured(names: Sequence[str] = ()) -> dict[str, JobRun]:
    """The runs of these jobs, or of all; raises NoHosts where there can't be hosts."""
    with Hosts(NUM_HOSTS, BITS_PER_S) as hosts, hosts.storage() as storage:
        return {name: _run(hosts, arguments) for name, arguments in jobs(storage).items() if name in names or not names}


def _run(hosts: Hosts, arguments: Sequence[str]) -> JobRun:
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:  # the judges may still be at it
        os.environ[told.FOLDER] = folder
        try:
            hosts.torchrun(1, ["-m", "book.job", PROGRAM, *arguments])
        finally:
            del os.environ[told.FOLDER]
        end_s = time.monotonic() + LIMIT_S
        while not Path(folder, FILE).exists() and time.monotonic() < end_s:
            time.sleep(0.2)
        return read_run(Path(folder, FILE))


if __name__ == "__main__":
    for name, run in measured().items():
        print(f"{name}:", *run.said, sep="\n  ")
