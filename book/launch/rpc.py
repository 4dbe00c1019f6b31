"""L2: remote procedure calls: an error that came from another worker, and the calls that a rank serves.

RPC runs calls from peers in its own threads, and returns an error as one long text: the name of the worker, its
traceback with all of torch's frames, and the same again for each worker that the error passed through.
"""
from __future__ import annotations

import itertools
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from book.launch import where
from book.launch.stacks import StackLine
from book.waiting.doing import Doing
from book.waiting.hang import Served, Worker

_WORKER = re.compile(r"On WorkerInfo\(id=\d+, name=(.+?)\):\n")
_FRAME = re.compile(r'^  File "([^"]+)", line (\d+), in (.*)', re.MULTILINE)
_TRACEBACK, _TRAILER = "Traceback (most recent call last):\n", "\n\nAt:\n"
_RPC, _SERVES = "/torch/distributed/rpc/", "_run_function"


@dataclass(frozen=True)
class RemoteFailure:
    """An error returned by a remote call: the worker that raised it, its name and text, the learner's lines there."""
    worker: str
    error: str
    places: tuple[where.Place, ...]


def remote_error(message: str) -> RemoteFailure | None:
    """The original error in the text of an RPC error; None for the text of any other error."""
    workers = list(_WORKER.finditer(message))
    if not workers or _TRACEBACK not in message[workers[-1].end():]:
        return None
    shown, _, text = message[workers[-1].end():].partition(_TRAILER)[0].rpartition(_TRACEBACK)
    # RPC turns an escaped newline in a frame's source into a real one, so find the error below the frames by its name.
    name = re.escape(shown.partition("(")[0])
    error = re.search(rf"^([\w.]+\.)?{name}\b.*", text, re.MULTILINE | re.DOTALL)
    lines = [StackLine(filename, int(number), function) for filename, number, function in _FRAME.findall(text)]
    return RemoteFailure(workers[-1][1], (error[0] if error else shown).strip(), tuple(where.places(lines)))


def worker(threads: Mapping[int, Sequence[StackLine]], does: Callable[[int], Doing]) -> Worker | None:
    """This process as a worker; None if it is not one.

    `threads` holds the lines of all threads, `does(ident)` says what one of them is doing.
    """
    agent = _agent()
    if agent is None:
        return None
    calls = [Served(does(thread), str(where.own_place(inner)))
             for thread, lines in threads.items() if (inner := called(lines))]
    calls.sort(key=lambda call: (call.doing.words(), call.place))  # the order of threads varies
    name, options = agent.get_worker_info().name, agent._get_backend_options()
    return Worker(name, getattr(options, "num_worker_threads", 0), tuple(calls))


def _agent() -> Any:
    api = sys.modules.get("torch.distributed.rpc.api")
    return api._get_current_rpc_agent() if api and api._is_current_rpc_agent_set() else None


def serves(lines: Sequence[StackLine]) -> bool:
    """Whether a thread at these lines runs a function that a peer has called."""
    return bool(called(lines))


def called(lines: Sequence[StackLine]) -> list[StackLine]:
    """The lines of the function that a peer has called; empty for a thread that serves no call."""
    names = [line.function if _RPC in line.filename else None for line in lines]
    if _SERVES not in names:
        return []
    rest = itertools.islice(lines, names.index(_SERVES), None)
    return list(itertools.dropwhile(lambda line: _RPC in line.filename, rest))
