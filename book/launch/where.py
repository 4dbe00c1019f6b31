"""L2: where a rank is: the learner's own line, and the operation that the rank waits in there.

They are the same in every run: no process ids, no addresses, no temporary paths.
"""
from __future__ import annotations

import functools
import linecache
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from types import FrameType, TracebackType
from typing import Any

from book.launch import pending
from book.launch.stacks import StackLine
from book.tap.place import BOOK, is_book, is_learners, is_unseen, outwards
from book.waiting.doing import Doing, Kind
from book.waiting.hang import GIVEN

# Calls that block in C++ directly, with no frame of torch.distributed below the caller's.
BLOCKING_CALLS = {"wait", "run_backward", "backward", "synchronize", "item", "cpu", "barrier", "shutdown", "to_here"}
COMMUNICATION_FILES = ("/torch/distributed/", "/torch/nn/parallel/")


@dataclass(frozen=True)
class Place:
    """A line of code: the file as a reader knows it ("cell" for a notebook's), line number and source."""
    label: str
    line: int
    source: str

    def __str__(self) -> str:
        return f"{self.label} line {self.line}" + (f": {self.source}" if self.source else "")


@functools.cache
def is_cell(filename: str) -> bool:
    """Whether a code object's file name is that of a notebook cell."""
    return "ipykernel_" in filename or filename.startswith("<ipython-input")


def is_given(filename: str) -> bool:
    """Whether a code object's file name is that of a cell which a lab gives to its learners."""
    return is_cell(filename) and linecache.getline(filename, 1).rstrip().endswith(GIVEN)


def cell_sources() -> dict[str, str]:
    """Source text of every notebook cell that this process knows, by file name, for use by the ranks."""
    cells = [(name, entry) for name, entry in list(linecache.cache.items()) if is_cell(name) and len(entry) > 2]
    return {name: "".join(entry[2]) for name, entry in cells}


def remember_sources(sources: dict[str, str]) -> None:
    """Let tracebacks and `inspect` in this process find the source of cells that were compiled elsewhere."""
    for name, text in sources.items():
        linecache.cache[name] = (len(text), None, text.splitlines(True), name)


def _place(line: StackLine) -> Place:
    label = "cell" if is_cell(line.filename) else _label(line.filename)
    return Place(label, line.number, line.source)


def _label(filename: str) -> str:
    if is_book(filename):
        return "book/" + os.path.realpath(filename)[len(BOOK):]
    return os.path.basename(filename)


def place_of(filename: str, number: int) -> Place:
    """The place of a line, by its file and number."""
    return _place(StackLine(filename, number, ""))


def own_lines(lines: Sequence[StackLine]) -> Sequence[StackLine]:
    """The lines that the learner wrote, of lines listed from the outermost call inwards.

    Falls back to the book's own lines, then to the innermost line, so there is always a line to show.
    """
    learner = [line for line in lines if is_learners(line.filename)]
    book = [line for line in lines if is_book(line.filename) and not is_unseen(line.filename)]
    return learner or book or lines[-1:]


def own_place(lines: Sequence[StackLine]) -> Place:
    """The innermost of the learner's lines; `lines` is not empty (see `own_lines`).

    In a student's copy of a lab it is one in the cells that the learner writes, if they have called what is given.
    """
    own = own_lines(lines)
    written = [line for line in own if not is_given(line.filename)]
    return _place((written or own)[-1])


def places(lines: Sequence[StackLine]) -> list[Place]:
    """The learner's lines, outermost first; none if only the launcher's code was running."""
    return [_place(line) for line in own_lines(lines) if not is_unseen(line.filename)]


def places_of_traceback(traceback: TracebackType | None) -> list[Place]:
    """The learner's lines in a traceback, as in `places`."""
    lines = []
    while traceback is not None:
        code = traceback.tb_frame.f_code
        lines.append(StackLine(code.co_filename, traceback.tb_lineno, code.co_name))
        traceback = traceback.tb_next
    return places(lines)


def stack(frame: FrameType | None) -> list[FrameType]:
    """Frames from the outermost call to `frame`."""
    return [*outwards(frame)][::-1]


def line_of(frame: FrameType) -> StackLine:
    """The line that a frame is at."""
    return StackLine(frame.f_code.co_filename, frame.f_lineno or 0, frame.f_code.co_name)


def own_frame(frames: Sequence[FrameType]) -> FrameType:
    """The innermost frame of the learner's code (see `own_lines`)."""
    lines = [line_of(frame) for frame in frames]
    own = own_lines(lines)[-1]
    return next(frame for frame, line in zip(reversed(frames), reversed(lines)) if line == own)


def communicates(lines: Sequence[StackLine]) -> bool:
    """Whether a thread at these lines waits for other ranks, if it waits at all."""
    return any(_is_communication(line.filename) for line in lines) or not lines[-1].calls().isdisjoint(BLOCKING_CALLS)


def sleeps(lines: Sequence[StackLine]) -> bool:
    """Whether a thread at these lines sleeps and will wake up by itself."""
    calls = lines[-1].calls()
    return "sleep" in calls and calls.isdisjoint(BLOCKING_CALLS)


def doing_at(lines: Sequence[StackLine]) -> Doing:
    """What a running thread is doing, in less detail than `doing`: it is not safe to read its frames."""
    if sleeps(lines):
        return Doing(Kind.SLEEPS)
    inside = [line.function for line in lines if _is_communication(line.filename)]
    called = next((name for name in inside if not _is_private(name)), None)
    return Doing(Kind.CALL, called) if called else Doing(Kind.COMPUTES)


def _is_private(name: str) -> bool:
    """Whether a name in torch.distributed is internal."""
    return name == "wrapper" or re.match(r"_(?!_)", name) is not None


def _is_communication(filename: str) -> bool:
    return any(part in filename for part in COMMUNICATION_FILES)


def _torch_frame(frames: list[FrameType]) -> FrameType | None:
    """The outermost frame in torch.distributed: the function that the learner called.

    Where torch calls the learner, as the forward of DDP does a model's, it is what the learner's innermost line called.
    An RRef's `rpc_sync()` enters through private functions; then it is the first public one.
    """
    called = frames[frames.index(own_frame(frames)) + 1:]
    inside = _communicating(called) or _communicating(frames)
    named = (frame for frame in inside if not _is_private(frame.f_code.co_name))
    return next(named, inside[0] if inside else None)


def _communicating(frames: Sequence[FrameType]) -> list[FrameType]:
    return [frame for frame in frames
            if _is_communication(frame.f_code.co_filename) and frame.f_code.co_name != "wrapper"]


def doing(frames: list[FrameType]) -> Doing:
    """What the thread with these frames is doing, if it waits for other ranks or sleeps; else it computes."""
    innermost = pending.call_name(pending.current_call(frames[-1]))
    if innermost == "sleep":
        return Doing(Kind.SLEEPS)
    called = _torch_frame(frames)
    if called is not None:
        return _operation(called)
    if innermost in BLOCKING_CALLS:
        return pending.describe(own_frame(frames), frames[-1])
    return Doing(Kind.COMPUTES)


def operation(frames: list[FrameType]) -> Doing | None:
    """The function of torch.distributed that these frames are in; None if there is none."""
    called = _torch_frame(frames)
    return None if called is None else _operation(called)


def _operation(frame: FrameType) -> Doing:
    """A torch.distributed function in progress, with its peer."""
    values, name = frame.f_locals, frame.f_code.co_name
    if "rpc_api" in values and "rref" in values:  # an RRef's rpc_sync() first asks the owner what it holds
        return Doing(Kind.CALL, values["rpc_api"].__name__, worker=values["rref"].owner_name())
    if "self" in values:
        owner = type(values["self"]).__name__
        return Doing(Kind.CALL, f"{owner}()" if name == "__init__" else f"{owner}.{name}()")
    worker = getattr(values.get("to"), "name", values.get("to"))
    if isinstance(worker, str):
        return Doing(Kind.CALL, name, worker=worker)
    return Doing(Kind.CALL, name, *pending.peer(name, _peer(values, "src"), _peer(values, "dst")))


def _peer(values: dict[str, Any], side: str) -> Any:
    """The rank of the world that an operation's `src` or `dst` names, or its `group_src` or `group_dst`."""
    place = values.get(f"group_{side}")
    if values.get(side) is not None or not isinstance(place, int):
        return values.get(side)
    import torch.distributed as dist
    return dist.get_process_group_ranks(values.get("group"))[place]
