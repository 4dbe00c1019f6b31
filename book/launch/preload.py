"""L2: load what ranks need; only the server process that ranks are forked from imports this module.

A rank forked from a process that has already imported torch starts in milliseconds instead of seconds. The launching
process never imports this module.
"""
from __future__ import annotations

import atexit
import gc
import importlib
import mmap
import os
import pkgutil
import resource
import signal
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

from book.launch import family
from book.launch.imports import FIRST, FOLDER, LATER, USED, WITH_ALL

CALM_S = 1.0  # without ranks, before the server goes on importing
SOON_S = 0.05  # before it goes on if ranks import for themselves what it has not
_left: list[str] = []  # what the server has still to import, in a rank what it had when the rank was forked
_missed: mmap.mmap | None = None  # one byte that the server shares with its ranks: whether one imported some of `_left`


def preload() -> None:
    """Import what ranks need, silently: `FIRST` and what the launcher has imported too, the rest from a timer.

    A module that is missing is skipped, and raises in the rank that uses it.
    """
    # An interrupt of the notebook reaches this process too, and must not end it during the imports.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _outlive_launcher()
    _share_cores_in_turns()
    _silence()
    launcher, folder = os.getppid(), os.environ.pop(FOLDER, "")
    atexit.register(_end_all, os.getpid(), launcher, folder)
    used = os.environ.pop(USED, "").split()
    gc.disable()  # nothing here is garbage, and to look through it takes a seventh of the time
    for name in [*FIRST, *_modules_of(WITH_ALL), *used]:
        if os.getppid() != launcher:
            _end_all(os.getpid(), launcher, folder)  # no ranks will be needed
        _load(name)
    gc.enable()
    _freeze()
    _load_later([name for name in LATER if name not in used])


def _load(name: str) -> None:
    with suppress(ImportError):
        importlib.import_module(name)


def _modules_of(packages: Iterable[str]) -> Iterator[str]:
    """The modules of packages, those of deeper ones excepted."""
    for package in packages:
        folders = importlib.import_module(package).__path__
        yield from (f"{package}.{module.name}" for module in pkgutil.iter_modules(folders))


def _freeze() -> None:
    # Otherwise a rank's garbage collector visits all that torch has imported, and every page of it is copied. To
    # collect first would take a quarter of a second and free a megabyte.
    gc.freeze()


def tell_server() -> None:
    """In a rank that ends: have the server import the rest soon if this rank had to import some of it."""
    if _missed is not None and _not_loaded(_left) != _left:
        _missed[0] = 1


def _not_loaded(names: Iterable[str]) -> list[str]:
    return [name for name in names if name not in sys.modules]


def _load_later(names: list[str]) -> None:
    """Import one more module each time the timer fires, in calm only until a rank has imported one by itself.

    The thread that imports also forks the ranks, so a launch has to wait until an import ends. That is worth it once a
    rank has imported some of it: each of the next ranks would too, and launches without a pause leave no calm.
    """
    global _missed
    server, before = os.getpid(), _children()
    _left[:] = _not_loaded(names)
    _missed = mine = mmap.mmap(-1, 1)

    def load_next(*_: object) -> None:
        nonlocal before
        if os.getpid() != server:
            return  # a rank that was forked when the timer had just fired
        now = _children()
        if mine[0] or (now == before and not now[0]):
            _load(_left.pop(0))
            _left[:] = _not_loaded(_left)  # it has imported others of them
        before = now
        if _left:
            signal.setitimer(signal.ITIMER_REAL, SOON_S if mine[0] else CALM_S)
        else:
            _freeze()

    if _left:
        signal.signal(signal.SIGALRM, load_next)
        signal.setitimer(signal.ITIMER_REAL, CALM_S)


def _children() -> tuple[str, float]:
    """This process's living children, if the system tells, and the CPU seconds of those that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    try:
        living = Path(f"/proc/self/task/{os.getpid()}/children").read_text()
    except OSError:
        living = ""  # not Linux, or a kernel that does not tell
    return living, used.ru_utime + used.ru_stime


def _outlive_launcher() -> None:
    """Survive a signal that kills the launcher's process group, and end all ranks and their children afterwards.

    The server learns of the launcher's end by a pipe, and leaves its main loop.
    """
    with suppress(PermissionError):  # it leads a session already
        os.setsid()
    family.adopt_orphans()


def _end_all(server: int, launcher: int, folder: str) -> None:
    if os.getpid() == server:  # a process that a rank forks runs this too
        family.end_children(server)
        _remove(folder, launcher)
        os._exit(0)  # to unload torch takes many seconds


def _remove(folder: str, launcher: int) -> None:
    """Remove the folder that multiprocessing has made for the launcher, which can't if a signal has killed it.

    It stays if another server's socket is there, as a rank that launches, or a process forked from the launcher, puts
    its sockets there too.
    """
    end_s = time.monotonic() + family.LIMIT_S
    while os.getppid() == launcher and time.monotonic() < end_s:
        time.sleep(0.001)  # it closes its files, which ends this server, just before it is gone
    if os.getppid() == launcher or not folder:
        return
    os.closerange(3, 1 << 16)  # this server's own socket too
    with suppress(OSError):  # not Linux, or the launcher has removed the folder itself
        in_use = Path("/proc/net/unix").read_text()
        for socket in Path(folder).glob("listener-*"):
            if str(socket) not in in_use:
                socket.unlink()
        os.rmdir(folder)


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
