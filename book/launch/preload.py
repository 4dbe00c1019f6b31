"""L2: load what ranks need; only the server process that ranks are forked from imports this module.

A rank forked from a process that has already imported torch starts in milliseconds instead of seconds. The launching
process never imports this module.
"""
from __future__ import annotations

import gc
import importlib
import os
import signal

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


def _silence() -> None:
    # A warning that a package prints on import would appear in the first cell that launches.
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    os.close(nowhere)


preload()
