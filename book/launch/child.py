"""L2: the rank's side of `launch`: what runs in each rank process, from start to exit.

A rank and its launcher share one duplex pipe. The launcher asks ("look", "report", "leave") and a thread of the
rank answers, so that a rank that waits for its peers can still say where it waits.
"""
from __future__ import annotations

import ctypes
import faulthandler
import io
import os
import pickle
import random
import signal
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from typing import Any

from book.launch import agreement, peers, remote, stacks, threads, where
from book.launch.board import Board

FIRST_SEED = 1000
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Failure:
    """An exception that ended a rank: its text, the learner's lines that led to it, and the full traceback."""
    name: str
    message: str
    places: tuple[where.Place, ...]
    traceback: str
    exception: bytes | None
    time_s: float


@dataclass(frozen=True)
class Report:
    """What a rank is doing ("waits in recv from rank 1"), where, and what it has recorded so far."""
    doing: str
    place: where.Place | None
    serves: Sequence[str]  # what it does at the same time for callers over RPC
    recorded: Any


def main(rank: int, control: Connection, output: Connection, errors: Connection, board: Board | None,
         job: bytes) -> None:
    """Run one rank: the target of its process. Never returns.

    Without a `board` the ranks do not compare their calls.
    """
    _leave_with_parent()
    _redirect(output, errors)
    line = _Line(control)
    threading.Thread(target=line.answer, daemon=True, name="launcher").start()
    try:
        line.send("done", _run(rank, job, board, line))
    except BaseException as error:
        _flush()
        line.send("failed", _failure(error), _recorded())
    # If a rank exited early, its peers would report a reset connection instead of the real error.
    line.leave.wait()
    _flush()
    os._exit(0)


def _leave_with_parent() -> None:
    """Make this process die when its launcher dies, however that happens."""
    os.setpgid(0, 0)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Every rank inherits the pipe that keeps the fork server alive. With it closed here, the server exits with the
    # notebook, and the ranks with the server, by the signal requested below.
    server = forkserver._forkserver
    if server._forkserver_alive_fd is not None:
        os.close(server._forkserver_alive_fd)
        server._forkserver_alive_fd = server._forkserver_address = None
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _redirect(output: Connection, errors: Connection) -> None:
    """Send everything this process prints, C++ included, to the launcher line by line."""
    for number, connection in ((1, output), (2, errors)):
        os.dup2(connection.fileno(), number)
        connection.close()
    sys.stdout, sys.stderr = (
        io.TextIOWrapper(open(number, "wb", 0, closefd=False), "utf-8", "backslashreplace", line_buffering=True)
        for number in (1, 2)
    )
    faulthandler.enable(file=2)
    faulthandler.register(signal.SIGUSR1, file=2, all_threads=False)


def _flush() -> None:
    """Flush Python's and C's output buffers."""
    sys.stdout.flush()
    sys.stderr.flush()
    ctypes.CDLL(None).fflush(None)


def _run(rank: int, job: bytes, board: Board | None, line: _Line) -> bytes:
    """Call the job's function; returns its pickled (result, recording)."""
    import cloudpickle
    env, sources, record, call = pickle.loads(job)
    os.environ.clear()
    os.environ.update(env, RANK=str(rank), LOCAL_RANK=str(rank))
    where.remember_sources(sources)
    _prepare_torch(rank)
    peers.refuse_missing()
    peers.refuse_itself()
    if board is not None:
        agreement.watch(board)
    function, args = cloudpickle.loads(call)
    _stand_in_for_main(function)
    if record:
        from book import record as recorder
        recorder.start()
    line.send("entered")
    result = function(*args)
    recorded = _recorded()
    try:
        return _dumps((result, recorded))
    except Exception as error:
        name = getattr(function, "__name__", "the function")
        raise TypeError(f"what {name} returned cannot be sent back ({error}): "
                        "return numbers, strings, lists, dicts or tensors") from None


def _stand_in_for_main(function: Any) -> None:
    """Make the names that the launching cell or script defines available in this process's `__main__`.

    RPC pickles a function by name, and the peer looks it up in its own `__main__`.
    """
    if getattr(function, "__module__", None) == "__main__":
        vars(sys.modules["__main__"]).update(getattr(function, "__globals__", {}))


def _prepare_torch(rank: int) -> None:
    """Set one thread per rank, and a random seed that differs between ranks and is the same in every run.

    Ranks are forked from one process. With its random state, a forgotten broadcast of the initial parameters would
    go unnoticed.
    """
    import numpy
    import torch
    import torch.distributed as dist
    torch.set_num_threads(1)
    dist.set_debug_level_from_env()
    for seed in (random.seed, numpy.random.seed, torch.manual_seed):
        seed(FIRST_SEED + rank)


def _dumps(value: Any) -> bytes:
    """Pickle by value; GPU tensors are moved to the CPU, so that results do not use the launcher's GPU."""
    import cloudpickle
    import torch

    class Pickler(cloudpickle.Pickler):
        def reducer_override(self, obj: Any) -> Any:
            if isinstance(obj, torch.Tensor) and obj.is_cuda:
                copy = obj.detach().cpu()
                if isinstance(obj, torch.nn.Parameter):
                    copy = torch.nn.Parameter(copy, obj.requires_grad)
                return copy.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
            return super().reducer_override(obj)

    buffer = io.BytesIO()
    Pickler(buffer).dump(value)
    return buffer.getvalue()


def _recorded() -> Any:
    """This rank's recording so far; None if it is not recorded or the recording cannot be read."""
    recorder = sys.modules.get("book.record")
    if recorder is None:
        return None
    try:
        return recorder.collect()
    except Exception:
        traceback.print_exc()
        return None


def _failure(error: BaseException) -> Failure:
    name, message = type(error).__name__, _text(error)
    if isinstance(error, SystemExit):
        name, message = "SystemExit", f"a rank must return, not call sys.exit({error.code!r})"
    try:
        exception = _dumps(error)
    except Exception:
        exception = None
    places = tuple(where.places_of_traceback(error.__traceback__))
    text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    return Failure(name, message, places, text, exception, time.monotonic())


def _text(error: BaseException) -> str:
    """What an exception says; some can't say it."""
    try:
        return str(error)
    except Exception as failed:
        return f"it has no text: its __str__ raised {type(failed).__name__}"


class _Line:
    """This rank's end of the pipe to its launcher."""

    def __init__(self, control: Connection) -> None:
        self.leave = threading.Event()
        self._control = control
        self._lock = threading.Lock()
        self._stillness = _Stillness()

    def send(self, kind: str, *content: Any) -> None:
        """Send one message; huge ones block until the launcher has read them."""
        message = pickle.dumps((kind, *content))
        with self._lock:
            self._control.send_bytes(message)

    def answer(self) -> None:
        """Answer the launcher until it says "leave" or dies."""
        try:
            while (question := self._control.recv()) != "leave":
                self.send(*self._reply(question))
        except (EOFError, OSError):
            os.killpg(0, signal.SIGKILL)  # this rank and every process that it has started
        self.leave.set()

    def _reply(self, question: str) -> tuple[Any, ...]:
        if question == "report":
            _flush()
            return "reported", _report()
        try:
            return "looked", self._stillness.measure_s()
        except Exception:  # no file descriptor may be left; the launcher is still there
            return "looked", 0.0


def _report() -> Report:
    try:
        return Report(*_whereabouts(), _recorded())
    except Exception:
        return Report("does not say where it is", None, (), _recorded())


def _whereabouts() -> tuple[str, where.Place, list[str]]:
    """What this rank does, where, and for which callers; reads only frames of threads that stand still (see stacks)."""
    main = threading.main_thread().ident
    main_stands, all_stand = threads.stand_still()
    lines = stacks.of_threads()
    frames = sys._current_frames() if all_stand else {main: sys._current_frames()[main]} if main_stands else {}
    doing = where.doing(where.stack(frames[main])) if main_stands else where.doing_at(lines[main])
    return doing, where.own_place(lines[main]), remote.served_calls(lines, frames)


class _Stillness:
    """How long this rank has waited in the same communication call.

    The main thread's CPU clock tells one wait from the next: a blocked thread uses no CPU time.
    """

    def __init__(self) -> None:
        self._mark: tuple[Any, ...] | None = None
        self._since_s = 0.0
        self._cpu_ns: dict[int, int] = {}
        self._queue: dict[int, tuple[bool, int]] = {}

    def measure_s(self) -> float:
        """Seconds since this rank last made progress, if it waits in communication; 0.0 if it makes progress."""
        now_s, mark = time.monotonic(), self._current_mark()
        cpu_ns = threads.cpu_ns() if mark is not None else {}
        if mark is None or mark != self._mark or threads.worked(self._cpu_ns, cpu_ns, now_s - self._since_s):
            self._mark, self._since_s, self._cpu_ns = mark, now_s, cpu_ns
        return now_s - self._since_s

    def _current_mark(self) -> tuple[Any, ...] | None:
        if not hasattr(time, "pthread_getcpuclockid"):
            return None  # macOS: a hang is then reported at the time limit
        main, lines = threading.main_thread().ident, stacks.of_threads()
        if main not in lines or not where.communicates(lines[main]):
            return None
        # Another thread may be asleep in a remote call for a peer. It will wake up and continue.
        if any(where.sleeps(other) for thread, other in lines.items() if thread != threading.get_ident()):
            return None
        if self._starves():
            return None  # a thread is waiting for a core on a loaded machine
        return lines[main][-1], time.clock_gettime_ns(time.pthread_getcpuclockid(main))

    def _starves(self) -> bool:
        """Whether a thread of this process is runnable and has not run since the last look.

        Being runnable is not enough: gloo's threads wake up 100 times a second, and on a loaded machine they queue for
        a core most of the time.
        """
        before, self._queue = self._queue, threads.queue()
        return any(runnable and before.get(thread, (False, turns))[1] == turns
                   for thread, (runnable, turns) in self._queue.items() if thread != threading.get_native_id())
