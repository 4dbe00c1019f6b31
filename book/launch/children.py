"""L2: the processes that a rank has started, such as the workers of a DataLoader: what each is doing, and where.

A child that was forked writes the stacks of its threads when it gets a signal, into a file that it shares with the
rank. Whether it has started anew (spawn), or runs another program, shows in its signals: then it is not asked.
"""
from __future__ import annotations

import faulthandler
import multiprocessing
import os
import signal
import sys
import time
import weakref
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import CodeType
from typing import Any

from book.launch import blocked, family, where
from book.launch.stacks import Stack, StackLine, of_crash, read
from book.launch.transfer import new_file
from book.tap.place import is_learners
from book.tap.replaced import replace
from book.waiting.doing import Doing, Kind
from book.waiting.hang import Child

ANSWER_S, CALM_S = 0.3, 0.02  # for a child to begin to write, and to go on
WORK_S = 0.05  # in which one that computes uses CPU time, or waits for a core
FIRST_S, LAST_S = 1.0, 30.0  # how long processes stand still before they are asked why; doubled each time
_STARTED = ("/multiprocessing/process.py", "_bootstrap")
_WORKER = ("/torch/utils/data/_utils/worker.py", "_worker_loop")
# Threads that only pass on what others make.
_SERVICES = (("/multiprocessing/queues.py", "_feed"), ("/multiprocessing/resource_sharer.py", "_serve"))
_loaders: weakref.WeakSet[Any] = weakref.WeakSet()
_file = _crashes = -1


def watch() -> None:
    """Have the processes that are forked from this one tell where they are when they are asked."""
    global _file
    _file = new_file(0)
    os.register_at_fork(after_in_child=_answer)


def watch_loaders(running: CodeType) -> None:
    """Know which processes are workers of a DataLoader, where they crash, and what they raise.

    When a worker dies, torch raises wherever the main thread is: it may only while it is in the function `running`, and
    not while the rank tells its launcher of the same failure.
    """
    import torch
    from torch.utils.data._utils import signal_handling
    from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter as Loader
    global _crashes
    _crashes = new_file(0)
    init, handlers = Loader.__init__, signal_handling._set_worker_signal_handlers
    fail = signal_handling._error_if_any_worker_fails

    def __init__(self: Any, *args: Any, **options: Any) -> None:
        _loaders.add(self)
        init(self, *args, **options)

    def set_handlers(*args: Any) -> None:
        handlers(*args)
        faulthandler.disable()  # torch's handlers have taken its place
        faulthandler.enable(file=_crashes)

    def fail_while_running() -> None:
        if any(frame.f_code is running for frame in where.stack(sys._getframe())):
            fail()

    replace(Loader, "__init__", __init__)
    replace(signal_handling, "_set_worker_signal_handlers", set_handlers)
    replace(signal_handling, "_error_if_any_worker_fails", fail_while_running)
    _keep_what_workers_raise(torch._utils.ExceptionWrapper)


def _keep_what_workers_raise(wrapper: Any) -> None:
    """Have torch's wrapper of a worker's error carry where it was raised to the process that raises it again."""
    wrap, reraise = wrapper.__init__, wrapper.reraise

    def keep(self: Any, exc_info: Any = None, where: str = "in background") -> None:
        wrap(self, exc_info or sys.exc_info(), where)
        with suppress(Exception):  # one that has no text
            self.raised = _raised(exc_info or sys.exc_info(), where)

    def raise_again(self: Any) -> None:
        try:
            reraise(self)
        except Exception as error:
            with suppress(Exception):  # one that takes no attributes
                error.raised_before = getattr(self, "raised", None)  # type: ignore[attr-defined]
            raise

    replace(wrapper, "__init__", keep)
    replace(wrapper, "reraise", raise_again)


def _raised(exc_info: Any, where_: str) -> tuple[str, str, str]:
    """Where an error was raised, "worker process 0 of its DataLoader", the learner's line, and its words."""
    kind, error, traceback_ = exc_info
    places = where.places_of_traceback(traceback_)
    number = where_.rpartition(" ")[2]
    return (f"worker process {number} of its DataLoader" if "worker" in where_ else "its DataLoader",
            str(places[-1]) if places else "", f"{kind.__name__}: {error}")


def raised(error: BaseException) -> str | None:
    """What a worker has raised, and where; None if this error comes from none."""
    said = getattr(error, "raised_before", None)
    if said is None:
        return None
    who, place, words = said
    return f"{who} raised it at {place}\n{words}" if place else f"{who} raised it\n{words}"


def lost() -> str | None:
    """A worker of a DataLoader that has died, how, and where; None if there is none."""
    for loader in list(_loaders):
        for number, worker in enumerate(getattr(loader, "_workers", ())):
            if worker.exitcode:
                who = f"worker process {number} of its DataLoader"
                how = worker._start_method or multiprocessing.get_start_method()
                return _how_it_died(who, worker.exitcode, how)
    return None


def _how_it_died(who: str, code: int, how: str) -> str:
    if code == -signal.SIGKILL:
        return f"{who} was killed by SIGKILL: the machine may have run out of memory"
    if code < 0:
        lines = of_crash(os.pread(_crashes, os.fstat(_crashes).st_size, 0).decode("utf-8", "replace"))
        own = [line for line in lines if is_learners(line.filename)]
        return f"{who} was killed by {signal.Signals(-code).name}" + (f" at {where.own_place(own)}" if own else "")
    ended = f"{who} ended with exit code {code}"
    if how != "fork":
        return (f"{ended}: it was started anew ({how}), and finds no classes of a notebook. Leave "
                "multiprocessing_context out, or import the dataset from a file")
    return f"{ended}: look for os._exit in the dataset and in collate_fn"


def _answer() -> None:
    faulthandler.register(signal.SIGUSR1, file=_file, all_threads=True)


def names() -> dict[int, str]:
    """The processes that this one has started with Python's or torch's classes: "worker process 0", by id."""
    found = {process.pid: f"process {process.name}"
             for process in list(multiprocessing.process._children)}  # type: ignore[attr-defined]
    for loader in list(_loaders):
        found |= {worker.pid: f"worker process {number}"
                  for number, worker in enumerate(getattr(loader, "_workers", ()))}
    return {pid: name for pid, name in found.items() if pid is not None}


def doing() -> tuple[Child, ...]:
    """What each of these processes is doing in the learner's code; none that waits for work."""
    names_, states, found = names(), family.descendants(os.getpid()), []
    asked = sorted(names_.keys() & states.keys(), key=names_.__getitem__)
    before = {pid: _ticks(pid) for pid in asked}
    if asked:
        time.sleep(WORK_S)
    works = {pid for pid in asked if states[pid] not in "SI" or _ticks(pid) != before[pid]}
    for pid in asked:  # to answer takes CPU time too: who works is known by then
        stacks = _stacks(pid)
        lines = _own(stacks[-1]) if stacks else []
        if any(is_learners(line.filename) for line in lines):
            found.append(Child(names_[pid], _doing(lines, pid in works), str(where.own_place(lines))))
    return tuple(found)


def waits_for(lines: Sequence[StackLine]) -> bool:
    """Whether a thread at these lines, if it uses no CPU, waits for a process and has set no time limit."""
    return any(line.filename.endswith("/torch/utils/data/dataloader.py") for line in lines) or (
        lines[-1].filename.endswith("/multiprocessing/popen_fork.py"))


def used() -> tuple[tuple[int, int], ...] | None:
    """The processes below this one and the CPU time that each has used; None if one runs or waits for a disk."""
    states = family.descendants(os.getpid())
    if any(state not in "SI" for state in states.values()):
        return None
    return tuple((pid, _ticks(pid)) for pid in sorted(states))


class ChildrenStillness:
    """Whether processes that stand still will do so for ever: asked rarely, since a signal is needed for it."""

    def __init__(self) -> None:
        self._mark: Any = None
        self._next_s, self._lasts = FIRST_S, False

    def lasts(self, mark: object, still_s: float) -> bool:
        """Whether they will, if `mark` has stayed the same for `still_s`; False if that is not known."""
        if mark != self._mark:
            self._mark, self._next_s, self._lasts = mark, FIRST_S, False
        if not self._lasts and still_s >= self._next_s:
            self._next_s = min(2 * self._next_s, self._next_s + LAST_S)
            self._lasts = _are_stuck()
        return self._lasts


def _are_stuck() -> bool:
    """Whether each process below this one waits without a limit for another thread or process, or for work."""
    names_, some_wait = names(), False
    for pid in family.descendants(os.getpid()):
        stacks = _stacks(pid) if pid in names_ else []
        if not stacks:
            return False
        for stack in stacks:
            lines = _own(stack)
            if any(_is_at(lines, service) for service in _SERVICES) or _is_idle(lines):
                continue
            if not blocked.without_limit(lines) or lines[-1].function == "run":  # whose target is written in C
                return False
            some_wait = True
    return some_wait


def _is_idle(lines: Sequence[StackLine]) -> bool:
    """Whether this is a worker that waits for the loader to ask for a batch."""
    return _is_at(lines, _WORKER) and not any(is_learners(line.filename) for line in lines) and (
        any(line.filename.endswith("/multiprocessing/queues.py") and line.function == "get" for line in lines))


def _is_at(lines: Sequence[StackLine], function: tuple[str, str]) -> bool:
    return any(line.filename.endswith(function[0]) and line.function == function[1] for line in lines)


def _own(stack: Stack) -> list[StackLine]:
    """A thread's lines without those of the rank that forked it."""
    lines = list(stack.lines)
    began = [number for number, line in enumerate(lines) if _is_at([line], _STARTED)]
    return lines[began[-1] + 1:] if began else lines


def _stacks(pid: int) -> list[Stack]:
    """The stacks of a process's threads, the main thread's last; none if it can't be asked."""
    if not _can_answer(pid):
        return []
    os.ftruncate(_file, 0)
    os.lseek(_file, 0, os.SEEK_SET)  # one file, and one place in it, for this process and its children
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGUSR1)
    size, end_s = 0, time.monotonic() + ANSWER_S
    while time.monotonic() < end_s:
        time.sleep(CALM_S)
        now = os.fstat(_file).st_size
        if now and now == size:
            break
        size = now
    return read(os.pread(_file, size, 0).decode("utf-8", "replace"))


def _can_answer(pid: int) -> bool:
    """Whether a process catches the signal: another program, started from here, would die of it."""
    try:
        fields = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
        return bool(int(fields["SigCgt"], 16) >> signal.SIGUSR1 - 1 & 1)
    except (OSError, KeyError, ValueError):
        return False


def _ticks(pid: int) -> int:
    """The CPU time that a process has used, in the kernel's units of 10 ms."""
    try:
        return sum(map(int, Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]))
    except (OSError, ValueError):
        return -1


def _doing(lines: Sequence[StackLine], works: bool) -> Doing:
    """What a thread at these lines is doing, by its source: its frames are in another process."""
    if where.sleeps(lines):
        return Doing(Kind.SLEEPS)
    if works:
        return Doing(Kind.COMPUTES)
    if blocked.takes_lock(lines[-1]):
        return Doing(Kind.LOCK)
    own = where.own_lines(lines)[-1]
    inside = lines[list(lines).index(own) + 1:]
    waits = inside[0].function if inside else blocked.waiting_call(own)
    return Doing(blocked.kind(waits), f"{waits}()") if waits else Doing(Kind.IDLE)
