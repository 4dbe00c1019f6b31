"""L2: what the tap, and what stands on it, has put in the place of torch's own, so that it can be put back."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

_undone: list[Callable[[], Any]] = []


def replace(owner: Any, name: str, new: Any) -> None:
    """Put `new` in the place of an attribute of a module or class, until `undo`: what others put there later stays."""
    old = vars(owner).get(name)

    def put_back() -> None:
        if vars(owner).get(name) is not new:
            return
        if old is None:
            delattr(owner, name)
        else:
            setattr(owner, name, old)

    when_stopped(put_back)
    setattr(owner, name, new)


def when_stopped(undo: Callable[[], Any]) -> None:
    """Have `undo` called once, by `tap.stop()`, before what was called for earlier."""
    _undone.append(undo)


def uncompiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that torch.compile leaves as it is, with all that it calls: C++ may call it from a compiled model."""
    import torch  # a launcher loads this module, and has no torch yet
    frames = torch._C._dynamo.eval_frame
    if hasattr(frames, "set_code_exec_strategy"):  # from torch 2.8 on
        skip = frames._FrameAction.SKIP
        frames.set_code_exec_strategy(function.__code__, frames._FrameExecStrategy(skip, skip))
    return function


def undo() -> None:
    """Put all of it back, the last first."""
    while _undone:
        _undone.pop()()
