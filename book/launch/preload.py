"""L2: imported first, and only, by the server process that ranks are forked from: loads what ranks will need.

A rank forked from a process that already holds torch starts in milliseconds instead of seconds. Launching itself
never imports this module.
"""
from __future__ import annotations

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
    """Import `MODULES` silently; one that is missing is skipped, and shows where a rank asks for it."""
    # An interrupt of the notebook reaches this process too: the imports must not die of it half-way.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _silence()
    launcher = os.getppid()
    for name in MODULES:
        if os.getppid() != launcher:
            os._exit(0)  # nobody is left to fork ranks for
        try:
            importlib.import_module(name)
        except ImportError:
            continue


def _silence() -> None:
    # A warning that some package prints while it is imported would land in the cell that launched first.
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    os.close(nowhere)


preload()
