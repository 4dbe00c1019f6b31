"""L2: the server that ranks are forked from, started early, since it takes seconds to load torch."""
from __future__ import annotations

import importlib.util
import multiprocessing
import os
import sys
import threading
import types
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing import forkserver, util
from typing import Any

from book.launch.imports import FOLDER, LATER, USED

HASH_SEED = "PYTHONHASHSEED"
main_module_lock = threading.Lock()


@contextmanager
def without_main_module() -> Iterator[None]:
    """Hide the launching script while a process starts."""
    # multiprocessing would import the launching script in every rank. cloudpickle makes that unnecessary.
    with main_module_lock:
        main = sys.modules["__main__"]
        sys.modules["__main__"] = types.ModuleType("__main__")
        try:
            yield
        finally:
            sys.modules["__main__"] = main


def context() -> Any:
    """How multiprocessing starts ranks."""
    return multiprocessing.get_context("forkserver")


@contextmanager
def new_interpreter(hash_seed: int) -> Iterator[Any]:
    """How multiprocessing starts a rank with a hash seed of its own: a fork would have its parent's."""
    before = os.environ.get(HASH_SEED)
    os.environ[HASH_SEED] = str(hash_seed)
    try:
        yield multiprocessing.get_context("spawn")
    finally:
        if before is None:
            del os.environ[HASH_SEED]
        else:
            os.environ[HASH_SEED] = before


def warm_up(whole: bool = False) -> None:
    """Start the process that ranks are forked from, if it is not running yet, without waiting for it.

    It imports torch and those parts of it that this process has imported, or with `whole` everything that ranks may
    need. Otherwise the rest follows once there have been no ranks for a while.
    """
    context().set_forkserver_preload(["book.launch.preload"])
    with without_main_module():
        os.environ[USED] = " ".join(name for name in LATER if whole or name in sys.modules)
        os.environ[FOLDER] = util.get_temp_dir()
        try:
            forkserver.ensure_running()
        finally:
            del os.environ[USED], os.environ[FOLDER]


def warm_up_in_kernel() -> None:
    """In a notebook's kernel, begin to load torch for the ranks, so that the first launch need not wait for it.

    It loads all of torch: cells that run one right after the other would leave no time to load the rest.
    """
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    can_launch = importlib.util.find_spec("torch") and "forkserver" in multiprocessing.get_all_start_methods()
    if getattr(shell, "kernel", None) is not None and can_launch:
        with suppress(OSError):  # the first launch says what is wrong
            warm_up(whole=True)


def _leave_fork_server_to_parent() -> None:
    """In a forked process: start its own fork server at the next launch. Only its parent can wait for the old one."""
    forkserver._forkserver._forkserver_pid = None  # type: ignore[attr-defined]


os.register_at_fork(after_in_child=_leave_fork_server_to_parent)


def server_pid() -> int | None:
    """The server's process; None if this process has not started one."""
    return forkserver._forkserver._forkserver_pid  # type: ignore[attr-defined]
