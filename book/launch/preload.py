"""L2: load what ranks need; only the server process that ranks are forked from imports this module.

A rank forked from a process that has already imported torch starts in milliseconds instead of seconds. The launching
process never imports this module.
"""
from __future__ import annotations

import atexit
import gc
import importlib
import os
import signal
from contextlib import suppress

from book.launch import family

MODULES = (
    "torch",
    "torch.distributed.rpc",
    "torch.distributed.optim",
    "torch.distributed.pipelining",
    "torch.distributed.tensor.parallel",
    "torch.distributed.fsdp",
    "torch.distributed.checkpoint",
    "torch.distributed.checkpoint.state_dict",
    "torch.profiler",
    "cloudpickle",
    "numpy.random",
    "book.launch.child",
    "book.record",
)


def preload() -> None:
    """Import `MODULES` silently; a missing one is skipped, and its ImportError is raised in the rank that uses it."""
    # An interrupt of the notebook reaches this process too, and must not end it during the imports.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _outlive_launcher()
    _share_cores_in_turns()
    _silence()
    launcher = os.getppid()
    for name in MODULES:
        if os.getppid() != launcher:
            os._exit(0)  # the launcher has ended: no ranks will be needed
        try:
            importlib.import_module(name)
        except ImportError:
            continue
    # Otherwise a rank's garbage collector visits all that torch has imported, and every page of it is copied.
    gc.collect()
    gc.freeze()


def _outlive_launcher() -> None:
    """Survive a signal that kills the launcher's process group, and end all ranks and their children afterwards.

    The server learns of the launcher's end by a pipe, and leaves its main loop.
    """
    with suppress(PermissionError):  # it leads a session already
        os.setsid()
    family.adopt_orphans()
    atexit.register(_end_all, os.getpid())


def _end_all(server: int) -> None:
    if os.getpid() == server:  # a process that a rank forks runs this too
        family.end_children(server)
        os._exit(0)  # to unload torch takes many seconds


def _share_cores_in_turns() -> None:
    """Let a rank that wakes up wait for its turn instead of interrupting another one; Linux only.

    A rank that is interrupted while it sends keeps gloo's lock, and gloo's thread asks for it again and again: 200,000
    times a second with 8 ranks on 2 cores.
    """
    if hasattr(os, "SCHED_BATCH"):
        with suppress(OSError):  # a sandbox may forbid it
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def _silence() -> None:
    # A warning that a package prints on import would appear in the first cell that launches.
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    os.close(nowhere)


preload()
