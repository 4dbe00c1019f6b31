"""L2: the rank's side of `launch`: what runs in each rank process, from start to exit.

A rank and its launcher share one duplex pipe. The launcher asks (see `Asked`) and a thread of the rank answers, so a
rank that waits for its peers can still say where it waits. What a rank tells is what `ranks.RankProcess` knows of it,
by its name there.
"""
from __future__ import annotations

import ctypes
import faulthandler
import io
import multiprocessing
import os
import pickle
import random
import signal
import sys
import threading
import time
import traceback
from dataclasses import dataclass, replace
from enum import Enum, auto
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from types import FrameType
from typing import Any

from book import audit, tap
from book.launch import children, explain, family, files, kept, sender, starts, transfer, where
from book.launch.agreement import Agreement
from book.launch.board import Board
from book.launch.messages import MessageAgreement
from book.launch.peers import Peers
from book.launch.report import Stillness, report, take_notes
from book.launch.transfer import Packed, SharedFile
from book.waiting.doing import Doing

FIRST_SEED = 1000


class Asked(Enum):
    """What a launcher asks: how long a rank has stood still, where it is, or to end."""
    LOOK = auto()
    REPORT = auto()
    LEAVE = auto()


@dataclass(frozen=True)
class Failure:
    """An exception that ended a rank: its text, the learner's lines that led to it, and the full traceback."""
    name: str
    message: str
    places: tuple[where.Place, ...]
    traceback: str
    exception: bytes | None
    time_s: float
    explained: str | None = None  # what is to be said in place of the message
    waited: explain.Waited | None = None  # if its time was up
    not_read: files.FailedRead | None = None
    doing: Doing | None = None  # the operation of torch.distributed that raised it


def main(rank: int, control: Connection, output: Connection, errors: Connection, board: Board | None,
         called: SharedFile, results: SharedFile, job: bytes) -> None:
    """Run one rank: the target of its process. Never returns.

    `called` holds the large buffers of the call, `results` gets those of its result. Without a `board` the ranks do not
    compare their calls.
    """
    _leave_with_parent()
    _redirect(output, errors)
    line = _Line(control)
    threading.Thread(target=line.answer, daemon=True, name="launcher").start()
    try:
        line.send(result=_run(rank, job, board, called, results, line), notes=_notes())
    except BaseException as error:
        _flush()
        line.send(failure=_failure(error), recorded=_recorded(), notes=_notes())
    _tell_server()
    # If a rank exited early, its peers would report a reset connection instead of the real error.
    line.leave.wait()
    _flush()
    os._exit(0)


def _leave_with_parent() -> None:
    """Make this process die when its launcher dies, for whatever reason."""
    os.setpgid(0, 0)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # the server's, see preload
    # Every rank inherits the pipe that keeps the fork server alive. With it closed here, the server exits with the
    # notebook, and the ranks with the server, by the signal requested below.
    server = forkserver._forkserver
    if server._forkserver_alive_fd is not None:
        os.close(server._forkserver_alive_fd)
        server._forkserver_alive_fd = server._forkserver_address = None
    family.die_with_parent()
    family.adopt_orphans()


def _tell_server() -> None:
    """Tell the server, if this rank was forked from one, whether it had to import what that had not."""
    preload = sys.modules.get("book.launch.preload")
    if preload is not None:
        preload.tell_server()


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
    children.watch()


def _flush() -> None:
    """Flush Python's and C's output buffers."""
    sys.stdout.flush()
    sys.stderr.flush()
    ctypes.CDLL(None).fflush(None)


def _run(rank: int, job: bytes, board: Board | None, called: SharedFile, results: SharedFile, line: _Line) -> Packed:
    """Call the job's function; returns its packed (result, recording)."""
    env, sources, starts_by, began_s, record, audited, call = pickle.loads(job)
    # A child of the fork server would start its own children there, without the classes of the cell or script.
    multiprocessing.set_start_method(starts_by, force=True)
    os.environ.clear()
    os.environ.update(env, RANK=str(rank), LOCAL_RANK=str(rank))
    where.remember_sources(sources)
    _prepare_torch(rank)
    tap.start()
    _watch(rank, board, began_s, audited)
    function, args = transfer.unpacked(call, called)
    _stand_in_for_main(function)
    if record:
        from book import record as recorder
        recorder.start(sender.cell_line)
    line.send(entered=True)
    result = function(*args)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch has set it, see children
    line.send(returned=True)
    recorded = _recorded()
    try:
        return transfer.packed((result, recorded), results, _on_cpu)
    except Exception as error:
        name = getattr(function, "__name__", "the function")
        raise TypeError(f"what {name} returned cannot be sent back ({error}): "
                        "return numbers, strings, lists, dicts or tensors") from None


def _watch(rank: int, board: Board | None, began_s: float, audited: bool | int) -> None:
    """See what this rank calls, refuse what can't be right, and take notes for the audit."""
    world_size, address = int(os.environ["WORLD_SIZE"]), (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
    messages = MessageAgreement(board.mail, world_size) if board is not None else None
    if audited:
        audit.start(None if audited is True else audited, messages.is_received if messages else None)
    compared = (Agreement(board), messages) if board is not None and messages is not None else ()
    tap.subscribe(Peers())
    take_notes()
    for subscriber in compared:
        tap.subscribe(subscriber)
    for subscriber in compared:  # a process that this rank forks is no rank of this launch: it has no part in the board
        os.register_at_fork(after_in_child=lambda own=subscriber: tap.unsubscribe(own))
    starts.watch(starts.Launched(rank, world_size, address, began_s, os.getpid(), bool(audited)))
    children.watch_loaders(_run.__code__)
    files.watch()
    kept.keep_destroyed_groups()


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


def _on_cpu(obj: Any) -> Any:
    """How a GPU tensor is pickled: as a CPU tensor, so that results do not use the launcher's GPU."""
    import torch
    if not isinstance(obj, torch.Tensor) or not obj.is_cuda:
        return NotImplemented
    copy = obj.detach().cpu()
    if isinstance(obj, torch.nn.Parameter):
        copy = torch.nn.Parameter(copy, obj.requires_grad)
    return copy.__reduce_ex__(pickle.HIGHEST_PROTOCOL)


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


def _notes() -> audit.Notes | None:
    """What this rank has noted for the audit; None if that fails."""
    try:
        return audit.notes(where.place_of)._replace(written=files.written(), alone=_alone())
    except Exception:
        traceback.print_exc()
        return None


def _alone() -> str | None:
    """The line that has started a world of this rank alone."""
    place = starts.alone()
    return None if place is None else str(where.place_of(*place))


def _failure(error: BaseException) -> Failure:
    found = failure(error, "a rank must return, not call sys.exit({!r})")
    try:
        exception = transfer.pickled(error, _on_cpu)
    except Exception:
        exception = None
    text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    return replace(found, traceback=text, exception=exception)


def failure(error: BaseException, exits: str) -> Failure:
    """An error in words, without the traceback; `exits` is what to say of a SystemExit with this code."""
    name, message = type(error).__name__, _text(error)
    if isinstance(error, SystemExit):
        name, message = "SystemExit", exits.format(error.code)
    places = tuple(where.places_of_traceback(error.__traceback__))
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    return Failure(name, message, places, "", None, time.monotonic(), explain.explained(error),
                   explain.waited(error, message), files.not_read(error), _operation(frames))


def _operation(frames: list[FrameType]) -> Doing | None:
    try:
        return where.operation(frames)
    except Exception:
        return None  # what its frames hold is not as expected


def _text(error: BaseException) -> str:
    """The exception's message; some exceptions raise when asked for it."""
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
        self._stillness = Stillness()

    def send(self, **told: Any) -> None:
        """Send one message; a huge one blocks until the launcher has read it."""
        message = pickle.dumps(told)
        with self._lock:
            self._control.send_bytes(message)

    def answer(self) -> None:
        """Answer the launcher until it says LEAVE or dies."""
        try:
            while (question := self._control.recv()) is not Asked.LEAVE:
                self.send(**self._reply(question))
        except (EOFError, OSError):
            os.killpg(0, signal.SIGKILL)  # this rank and every process that it has started
        self.leave.set()

    def _reply(self, question: Asked) -> dict[str, Any]:
        if question is Asked.REPORT:
            _flush()
            _tell_server()  # a rank that does not come to its end is asked before it is killed
            told = report(_recorded, _notes, self._stillness.polled)
            return {"report": told, "notes": told.notes}
        try:
            still_s = self._stillness.measure_s()
        except Exception:  # perhaps no file descriptor is left; the launcher still expects an answer
            still_s = 0.0
        return {"still_s": still_s, "stopped_s": None}
