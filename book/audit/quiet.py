"""L2: what noting may do to a run: take a small share of its time, and never disturb it."""
from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any

import torch

FREE_S, MOST_SHARE = 0.03, 0.01  # the time that noting may take: so much, and this share


class Time:
    """What noting has taken, of the time that the process has computed since it began.

    Where ranks wait for one another or for a core, a share of the time on the clock would be more of what they compute.
    """

    def __init__(self) -> None:
        self.began_s, self.spent_s = time.process_time(), 0.0

    def is_spent(self) -> bool:
        """Whether noting has had its share."""
        return self.spent_s > FREE_S + MOST_SHARE * (time.process_time() - self.began_s)

    def __enter__(self) -> None:
        self._since_s = time.thread_time()

    def __exit__(self, *_: Any) -> None:
        self.spent_s += time.thread_time() - self._since_s


def quietly(note: Callable[..., None]) -> Callable[..., None]:
    """A function that notes something, and never disturbs the program."""
    @functools.wraps(note)
    def noted(*args: Any, **options: Any) -> None:
        if torch.compiler.is_compiling():
            return
        try:
            if not torch._C._len_torch_dispatch_stack():
                return note(*args, **options)
            with torch.utils._python_dispatch._disable_current_modes():  # they would take this for the program's work
                note(*args, **options)
        except Exception:
            pass  # then less is known, and nothing is said

    return noted
