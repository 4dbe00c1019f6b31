"""L2: the files that this rank has written, for a rank that reads one of them too early.

Python announces each file that it opens and each that it renames. What torch saves it opens in C++, unseen.
"""
from __future__ import annotations

import functools
import os
import pickle
import sys
import time
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from book.tap.log import Place
from book.tap.place import caller, is_learners
from book.tap.replaced import replace

MOST = 256  # files that are remembered
_WRITES = os.O_WRONLY | os.O_RDWR


class Write(NamedTuple):
    """When this rank began to write a file, by time.monotonic(), and the line that did."""
    began_s: float
    place: Place


class FailedRead(NamedTuple):
    """A file that could not be read, and when that was, by time.monotonic()."""
    path: str
    failed_s: float


_CODE = (".py", ".pyc", ".so")
_written: dict[str, Write] = {}
_opened: deque[str] = deque(maxlen=1)
_told: list[Callable[[], None]] = []


def watch(tell: Callable[[], None] | None = None) -> None:
    """Remember what this process writes from now on, and `tell` of each further file when the process begins it."""
    import torch
    _told.extend([tell] if tell else ())
    sys.addaudithook(_heard)
    replace(torch, "save", _saves(torch.save))


def last_file(checkpoint: Any) -> str | None:
    """The file of a distributed checkpoint that is written last."""
    return os.path.join(checkpoint, ".metadata") if isinstance(checkpoint, (str, os.PathLike)) else None


def written() -> dict[str, Write]:
    """The files that this rank has written, by full path."""
    return dict(_written)


def not_read(error: BaseException) -> FailedRead | None:
    """The file whose absence or unfinished state has raised this error; None if it is not known to be one."""
    now_s = time.monotonic()
    if isinstance(error, FileNotFoundError) and isinstance(error.filename, str):
        return FailedRead(_full(error.filename), now_s)
    path: Any = None
    for frame, _ in traceback.walk_tb(error.__traceback__):
        if frame.f_code.co_name == "load" and frame.f_code.co_filename.endswith("/torch/serialization.py"):
            path = frame.f_locals.get("f")
        elif frame.f_code.co_name == "load" and frame.f_code.co_filename.endswith("/checkpoint/state_dict_loader.py"):
            path = last_file(frame.f_locals.get("checkpoint_id"))
    if path is None and isinstance(error, (EOFError, ValueError, pickle.UnpicklingError)) and _opened:
        path = _opened[-1]
    return FailedRead(_full(path), now_s) if isinstance(path, (str, os.PathLike)) else None


def _heard(event: str, args: Sequence[Any]) -> None:
    if event == "open" and isinstance(args[0], str) and not args[0].endswith(_CODE):
        if args[2] & _WRITES:
            _note(args[0])
        else:
            _opened.append(args[0])
    elif event == "os.rename":
        _note(args[1])


def _note(path: Any) -> None:
    place = caller(sys._getframe(1))[1]
    if place and is_learners(place[0]) and len(_written) < MOST and isinstance(path, (str, os.PathLike)):
        path = _full(path)
        is_new = path not in _written
        _written[path] = Write(time.monotonic(), place)
        for tell in _told if is_new else ():
            tell()


def _saves(save: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(save)
    def noted(obj: Any, f: Any, *args: Any, **options: Any) -> None:
        _note(f)
        save(obj, f, *args, **options)

    return noted


def _full(path: Any) -> str:
    with suppress(OSError):  # the working directory has been deleted
        return os.path.realpath(os.fsdecode(path))
    return os.fsdecode(path)
