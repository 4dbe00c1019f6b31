"""L2: requests of isend and irecv that a rank has dropped, and the lines that made them.

gloo cancels a message whose request Python has deleted. A request does not say where it was made, or whether the
program has waited for it; the tap notes both, as long as the request lives.
"""
from __future__ import annotations

import sys
from typing import Any, NamedTuple

from book.tap import Op, Subscriber


class Made(NamedTuple):
    """What made a request: "isend" or "irecv", the peer, and the file and line of the call."""
    call: str
    peer: int | None
    filename: str
    line: int


_dropped: dict[Made, None] = {}  # a set that keeps its order


class Requests(Subscriber):
    """Has this process note the requests that it drops."""

    def dropped(self, op: Op) -> None:
        _dropped[_made(op)] = None


def dropped() -> list[Made]:
    """The requests that this process has deleted before it had waited for them; each line once."""
    return list(_dropped)


def made(request: Any) -> Made | None:
    """What made a request that this process has not waited for; None if that is not known."""
    tapped = sys.modules.get("book.tap.work")
    if tapped is None or not isinstance(request, tapped.Request) or not request.is_open:
        return None
    return _made(request.ops[0])


def _made(op: Op) -> Made:
    return Made(f"i{op.kind}", op.peer, *(op.place or ("", 0)))
