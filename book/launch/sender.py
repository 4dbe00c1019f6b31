"""L2: which line of a notebook's cell has sent a message; of helpers between, the line that chose what they send."""
from __future__ import annotations

import functools
import sys
from collections.abc import Iterable, Iterator, Sequence
from types import FrameType
from typing import Any

from book.launch.around import in_loop
from book.launch.stacks import StackLine
from book.launch.where import is_cell
from book.tap.place import outwards, variables
from book.trace_schema import CellLine

LONGEST_LINE = 120  # characters of a line that a trace keeps
# Functions that Python makes of a part of a line, up to 3.11 of every comprehension.
_COMPREHENSIONS = {"<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>"}


def cell_line(sent: Sequence[Any] = ()) -> CellLine | None:
    """The line of a notebook cell that sends these tensors in this thread; None without a cell.

    It is the innermost one, unless that is in a function without a loop which was handed one of the tensors. Such a
    helper has not chosen what it sends: then it is the caller's line, if that or one of its callers' stands in a loop.
    From Python 3.12 on a comprehension counts as no loop. An argument that is bound anew counts as handed.

    Called for every message of a recorded run: a few microseconds, and no file is read twice.
    """
    frames = _frames(sys._getframe(1))
    innermost = frame = next(frames, None)
    while frame is not None and not _loops(frame) and _is_handed(frame, sent):
        frame = next(frames, None)
    scheduled = frame is not None and (_loops(frame) or any(map(_loops, frames)))
    chosen = frame if scheduled else innermost
    if chosen is None:
        return None
    names = (each.f_code.co_name for each in _frames(chosen))
    function = next((name for name in names if name not in _COMPREHENSIONS), "<module>")
    return _numbered(chosen.f_code.co_filename, chosen.f_lineno or 0, function)


def _frames(frame: FrameType | None) -> Iterator[FrameType]:
    """The frames of notebook cells, innermost first."""
    return (each for each in outwards(frame) if is_cell(each.f_code.co_filename))


def _loops(frame: FrameType) -> bool:
    return frame.f_code.co_name in _COMPREHENSIONS or in_loop(frame.f_code.co_filename, frame.f_lineno or 0)


def _is_handed(frame: FrameType, sent: Iterable[Any]) -> bool:
    """Whether one of the tensors is an argument of the function that runs in a frame."""
    code = frame.f_code
    names = code.co_varnames[:code.co_argcount + code.co_kwonlyargcount]
    return bool(names) and any(value is tensor for value in variables(frame, names) for tensor in sent)


@functools.cache
def _numbered(filename: str, number: int, function: str) -> CellLine:
    source = StackLine(filename, number, function).source
    return CellLine(number, function, source if len(source) <= LONGEST_LINE else source[:LONGEST_LINE - 1] + "…")
