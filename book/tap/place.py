"""L2: whose code a file is, and which line of the program made a call, by itself or through a part of torch.

A line is kept as a file and a number; whoever shows it reads its source.
"""
from __future__ import annotations

import functools
import os
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from types import CodeType, FrameType
from typing import Any, NamedTuple

from book.tap.log import Place

LIBRARY_FILES = ("/site-packages/", "/dist-packages/", "<frozen ")
_STDLIB = tuple({os.path.realpath(sysconfig.get_path(name)) + os.sep for name in ("stdlib", "platstdlib")})
BOOK = os.path.dirname(os.path.dirname(os.path.realpath(__file__))) + os.sep
_BETWEEN = tuple(os.path.join(BOOK, part) + os.sep for part in ("tap", "audit", "launch", "job"))
API_FILES = ("/torch/distributed/distributed_c10d.py", "/torch/distributed/c10d_logger.py")

# The functions of torch.distributed that calls are named after; they call each other.
POINT_TO_POINT = frozenset({"isend", "irecv", "send", "recv"})
COLLECTIVES = frozenset({
    "all_reduce", "reduce", "broadcast", "all_gather", "all_gather_into_tensor", "all_gather_single", "gather",
    "scatter", "reduce_scatter", "reduce_scatter_tensor", "reduce_scatter_single", "all_to_all", "all_to_all_single",
    "barrier"})
OF_OBJECTS = frozenset({"all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list"})
_FUNCTIONS = POINT_TO_POINT | COLLECTIVES | OF_OBJECTS
# The parts of torch that make calls of their own, as a reader knows them, by their files; the first that fits.
_OWNERS = (
    ("/torch/distributed/algorithms/join.py", "join()"),
    ("/torch/distributed/algorithms/ddp_comm_hooks/", "DDP"), ("/torch/nn/parallel/distributed.py", "DDP"),
    ("/torch/nn/modules/_functions.py", "SyncBatchNorm"),
    ("/torch/distributed/fsdp/", "FSDP"), ("/torch/distributed/_composable/", "FSDP"),
    ("/torch/distributed/tensor/", "DTensor"), ("/torch/distributed/pipelining/", "the pipeline"),
    ("/torch/distributed/checkpoint/", "the checkpoint"),
    ("/torch/distributed/optim/zero_redundancy_optimizer.py", "ZeroRedundancyOptimizer"),
)

_LEARNERS, _API, _UNSEEN, _OTHER, _AUTOGRAD = range(5)  # whose a file is, unless it is that of an owner


class _Known(dict[str, "int | str"]):
    """Whose the files are that have been looked at."""

    def __missing__(self, filename: str) -> int | str:
        whose = self[filename] = _whose(filename)
        return whose


_known = _Known()


class Caller(NamedTuple):
    """Who made a call; `owner` is the part of torch that did so for the program, None if the program did itself."""
    function: str | None
    place: Place | None
    owner: str | None
    in_backward: bool


@functools.cache
def is_learners(filename: str) -> bool:
    """Whether a code object's file name is that of the learner's own code."""
    return not is_library(filename) and not is_book(filename)


def _real(filename: str) -> str:
    """The full path of a file; in a directory that has been deleted, its name."""
    try:
        return os.path.realpath(filename)
    except OSError:
        return filename


def is_library(filename: str) -> bool:
    """Whether a file is a package's or Python's own."""
    return any(part in filename for part in LIBRARY_FILES) or _real(filename).startswith(_STDLIB)


def is_book(filename: str) -> bool:
    """Whether a file is this package's."""
    return _real(filename).startswith(BOOK)


@functools.cache
def is_unseen(filename: str) -> bool:
    """Whether a file is a part of this package that stands between a program and torch, and is never shown."""
    return _real(filename).startswith(_BETWEEN)


_places: dict[int, tuple[CodeType, dict[int, Place]]] = {}  # of code by its id, which it keeps: its lines by f_lasti
MOST_CODE = 4096


def place_in(frame: FrameType) -> Place:
    """The file and the line that a frame is in; line 0 if it has none.

    `f_lineno` reads a function's table of lines from its beginning, each time: in a loop of a hundred lines that takes
    longer than all else that is noted of a call.
    """
    code, at = frame.f_code, frame.f_lasti
    known = _places.get(id(code))
    if known is None:
        if len(_places) >= MOST_CODE:
            _places.clear()
        known = _places[id(code)] = code, {}
    place = known[1].get(at)
    if place is None:
        place = known[1][at] = code.co_filename, frame.f_lineno or 0
    return place


def caller(frame: FrameType | None) -> Caller:
    """Who calls `frame`: the outermost function of torch.distributed, and the learner's line that called it.

    Without a line of the learner, it is that of whatever called torch.distributed; None where no Python did.
    """
    return _sought(frame)[0]


def caller_and_chain(frame: FrameType | None) -> tuple[Caller, tuple[Place, ...]]:
    """The `caller` of a frame, and the `chain` of lines that leads to it: its stack is walked once."""
    by, own = _sought(frame)
    return by, chain(own)


def _sought(frame: FrameType | None) -> tuple[Caller, FrameType | None]:
    """Who calls `frame`, and the innermost frame of the learner."""
    function, owner, other, in_backward = None, None, None, False
    while frame is not None:
        code = frame.f_code
        whose = _known[code.co_filename]
        if whose == _LEARNERS:
            return Caller(function, place_in(frame), owner, in_backward), frame
        if whose == _API:
            other = None
            if code.co_name in _FUNCTIONS:
                function = code.co_name
        elif whose != _UNSEEN:
            other = other or frame
            in_backward = in_backward or whose == _AUTOGRAD
            if owner is None and type(whose) is str:
                owner = whose
        frame = frame.f_back
    return Caller(function, place_in(other) if other else None, owner, in_backward or other is None), None


def chain(frame: FrameType | None) -> tuple[Place, ...]:
    """The learner's lines that have led to `frame`, innermost first."""
    lines = []
    while frame is not None:  # for each call of a collective: `outwards` would take a fifth longer
        if _known[frame.f_code.co_filename] == _LEARNERS:
            lines.append(place_in(frame))
        frame = frame.f_back
    return tuple(lines)


def outwards(frame: FrameType | None) -> Iterator[FrameType]:
    """A frame and those that have led to it, innermost first."""
    while frame is not None:
        yield frame
        frame = frame.f_back


def variables(frame: FrameType, names: Iterable[str]) -> list[Any]:
    """The values of variables of a frame, None of those that it has not; to read them keeps nothing alive."""
    values = frame.f_locals
    found = [values.get(name) for name in names]
    # Up to Python 3.12 those of a function are a copy that its frame keeps, and with it what a rank drops. If only the
    # frame, this name and the argument refer to it, it is neither a namespace nor what a learner got from `locals()`.
    if isinstance(values, dict) and sys.getrefcount(values) == 3:
        values.clear()
    return found


def _whose(filename: str) -> int | str:
    if is_learners(filename):
        return _LEARNERS
    if owner := next((owner for part, owner in _OWNERS if part in filename), None):
        return owner
    if filename.endswith("/torch/autograd/graph.py"):
        return _AUTOGRAD
    return _API if filename.endswith(API_FILES) else _UNSEEN if is_unseen(filename) else _OTHER
