"""L2: what this rank does that can't be right, by what the others do: it is noted, and the program goes on."""
from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from book.job.told import Told
from book.launch import starts
from book.launch.agreement import Agreement, CallMismatch
from book.launch.board import Board
from book.launch.mail import MessageBoard
from book.launch.messages import MessageAgreement
from book.tap import Op
from book.tap.log import Place

if TYPE_CHECKING:
    import torch


class Compared(Agreement):
    """Compares calls with those of this host's other ranks until one can't be right: `tell` is called with that."""

    def __init__(self, board: Board, tell: Callable[[str], None]) -> None:
        super().__init__(board)
        self._differs = False
        self._tell = tell

    def note(self, words: str) -> None:
        """Have the first such thing told before the program goes on: gloo may end the process in this call."""
        if not self._differs:
            self._differs = True
            self._tell(words)

    def before(self, op: Op) -> None:
        if self._differs:
            return
        try:
            super().before(op)
        except CallMismatch as error:
            self.note(str(error))


class Exchanged(MessageAgreement):
    """Compares messages, and the parts of an all-to-all, with what their other side expects."""

    def __init__(self, mail: MessageBoard, world_size: int, compared: Compared) -> None:
        super().__init__(mail, world_size)
        self._compared = compared

    def issued(self, op: Op, tensors: Sequence[torch.Tensor]) -> None:
        try:
            super().issued(op, tensors)
        except CallMismatch as error:
            self._compared.note(str(error))


def wrong_start(told: Told, init: Callable[..., Any], args: Sequence[Any], options: Mapping[str, Any],
                found: tuple[str, int], written: Mapping[str, Place]) -> str | None:
    """Why this call of `init_process_group` can't succeed; None if it can, or if that is not known.

    `found` is the address that torchrun had set, `written` has the variables that the script has set since.
    """
    starts.written.update(written)
    launched = starts.Launched(told.rank, told.world_size, found, _began_s(os.getppid()), told.pid, by="torchrun",
                               run="job", attempt=os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    return starts.never_meets(init, args, options, launched)


def _began_s(pid: int) -> float:
    """When a process began, by time.time(); 0.0 if the system does not say."""
    try:
        ticks = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
        return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME) + ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, AttributeError):
        return 0.0
