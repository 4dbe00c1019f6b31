"""L2: remote procedure calls in words: an error that came from another worker, the calls that a rank serves.

RPC runs calls from peers in its own threads, and returns an error as one long text: the name of the worker, its
traceback with all of torch's frames, and the same again for each worker that the error passed through.
"""
from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import FrameType

from book.launch import where
from book.launch.stacks import Line

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
    lines = [Line(filename, int(number), function) for filename, number, function in _FRAME.findall(text)]
    return RemoteFailure(workers[-1][1], (error[0] if error else shown).strip(), tuple(where.places(lines)))


def served_calls(threads: Mapping[int, Sequence[Line]], frames: Mapping[int, FrameType]) -> list[str]:
    """What this process is doing for its peers: "for a peer it waits in to_here at ...", one line for each call.

    `threads` holds the lines of all threads, `frames` the innermost frames of idle ones, which give more detail.
    """
    counts: Counter[tuple[str, str]] = Counter()
    for thread, lines in threads.items():
        inner = _called(lines)
        if inner:
            stack = where.stack(frames[thread])[-len(inner):] if thread in frames else []
            doing = where.doing(stack) if stack else where.doing_at(inner)
            counts["is" if doing == "computes" else doing, str(where.own_place(inner))] += 1
    return [f"for a peer it {doing} at {place}" if count == 1 else
            f"for its peers, in {count} threads, it {doing} at {place}"
            for (doing, place), count in sorted(counts.items())]


def serves(lines: Sequence[Line]) -> bool:
    """Whether a thread at these lines runs a function that a peer has called."""
    return bool(_called(lines))


def _called(lines: Sequence[Line]) -> list[Line]:
    """The lines of the function that a peer has called; empty for a thread that serves no call."""
    names = [line.function if _RPC in line.filename else None for line in lines]
    if _SERVES not in names:
        return []
    rest = itertools.islice(lines, names.index(_SERVES), None)
    return list(itertools.dropwhile(lambda line: _RPC in line.filename, rest))
