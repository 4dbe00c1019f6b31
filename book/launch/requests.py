"""L2: requests of isend and irecv that a rank has dropped, and the lines that made them.

gloo cancels a message whose request Python has deleted. A request does not say where it was made, or whether the
program has waited for it; the tap notes both, as long as the request lives.
"""
from __future__ import annotations

import sys
import time
from collections import Counter
from typing import Any, NamedTuple

from book import tap
from book.tap import Op, Subscriber
from book.tap.log import Place

POLLED_S = 1.0  # a request that was last asked for longer ago is not polled


class RequestOrigin(NamedTuple):
    """What made a request: "isend" or "irecv", the peer, and the file and line of the call."""
    call: str
    peer: int | None
    filename: str
    line: int


_dropped: dict[RequestOrigin, None] = {}  # a set that keeps its order


class Requests(Subscriber):
    """Has this process note the requests that it drops."""

    def dropped(self, op: Op) -> None:
        _dropped[_made(op)] = None


def dropped() -> list[RequestOrigin]:
    """The requests that this process has deleted before it had waited for them; each line once."""
    return list(_dropped)


def sent() -> list[tuple[int, Place]]:
    """The isends among the last calls that this process has not waited for: to whom, and the lines."""
    return [(op.peer, op.place) for op in tap.ops() if op.function == "isend" and op.peer is not None and op.place
            and not (op.waited or op.withdrawn)]


def messages() -> dict[tuple[str, int], int]:
    """How many messages this process has sent to each rank and received from each: {("send", 1): 4}.

    Nothing if the log no longer has the first of them.
    """
    ops = tap.ops()
    if not ops or ops[0].serial != 1:
        return {}
    return Counter((op.kind, op.peer) for op in ops if op.is_message and op.peer is not None and not op.withdrawn)


def polled() -> RequestOrigin | None:
    """What made the request that this process asks for again and again; None if there is none."""
    now_s = time.monotonic()
    asked = [op for op in tap.ops() if op.is_message and not op.waited and now_s - op.polled_s < POLLED_S]
    return _made(asked[-1]) if asked else None


def made(request: Any) -> RequestOrigin | None:
    """What made a request that this process has not waited for; None if that is not known."""
    tapped = sys.modules.get("book.tap.work")
    if tapped is None or not isinstance(request, tapped.Request) or not request.is_open:
        return None
    return _made(request.ops[0])


def _made(op: Op) -> RequestOrigin:
    return RequestOrigin(f"i{op.kind}", op.peer, *(op.place or ("", 0)))
