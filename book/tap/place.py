"""L2: whose code a file is, and which line of the program made a call.

A line is kept as a file and a number; whoever shows it reads its source.
"""
from __future__ import annotations

import functools
import os
import sysconfig
from types import FrameType

from book.tap.log import Place

LIBRARY_FILES = ("/site-packages/", "/dist-packages/", "<frozen ")
_STDLIB = tuple({os.path.realpath(sysconfig.get_path(name)) + os.sep for name in ("stdlib", "platstdlib")})
BOOK = os.path.dirname(os.path.dirname(os.path.realpath(__file__))) + os.sep
_BETWEEN = tuple(os.path.join(BOOK, part) + os.sep for part in ("tap", "audit", "launch"))
_API_FILES = ("/torch/distributed/distributed_c10d.py", "/torch/distributed/c10d_logger.py")

# The functions of torch.distributed that calls are named after; they call each other.
POINT_TO_POINT = frozenset({"isend", "irecv", "send", "recv"})
COLLECTIVES = frozenset({
    "all_reduce", "reduce", "broadcast", "all_gather", "all_gather_into_tensor", "all_gather_single", "gather",
    "scatter", "reduce_scatter", "reduce_scatter_tensor", "reduce_scatter_single", "all_to_all", "all_to_all_single",
    "barrier"})
OF_OBJECTS = frozenset({"all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list"})
_FUNCTIONS = POINT_TO_POINT | COLLECTIVES | OF_OBJECTS


_LEARNERS, _API, _UNSEEN, _OTHER = range(4)  # whose a file is
_known: dict[str, int] = {}


@functools.cache
def is_learners(filename: str) -> bool:
    """Whether a code object's file name is that of the learner's own code."""
    return not is_library(filename) and not is_book(filename)


def is_library(filename: str) -> bool:
    """Whether a file is a package's or Python's own."""
    return any(part in filename for part in LIBRARY_FILES) or os.path.realpath(filename).startswith(_STDLIB)


def is_book(filename: str) -> bool:
    """Whether a file is this package's."""
    return os.path.realpath(filename).startswith(BOOK)


@functools.cache
def is_unseen(filename: str) -> bool:
    """Whether a file is a part of this package that stands between a program and torch, and is never shown."""
    return os.path.realpath(filename).startswith(_BETWEEN)


def caller(frame: FrameType | None) -> tuple[str | None, Place | None]:
    """The outermost function of torch.distributed that calls `frame`, and the learner's line that called it.

    Without a line of the learner, it is that of whatever called torch.distributed; None where no Python did.
    """
    function, other = None, None
    while frame is not None:
        code = frame.f_code
        whose = _known.get(code.co_filename, -1)
        if whose < 0:
            whose = _known[code.co_filename] = _whose(code.co_filename)
        if whose == _LEARNERS:
            return function, (code.co_filename, frame.f_lineno or 0)
        if whose == _API:
            other = None
            if code.co_name in _FUNCTIONS:
                function = code.co_name
        elif other is None and whose == _OTHER:
            other = frame
        frame = frame.f_back
    return function, (other.f_code.co_filename, other.f_lineno or 0) if other else None


def _whose(filename: str) -> int:
    if is_learners(filename):
        return _LEARNERS
    return _API if filename.endswith(_API_FILES) else _UNSEEN if is_unseen(filename) else _OTHER
