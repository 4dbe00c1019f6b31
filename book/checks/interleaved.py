"""L3, lab 15: two calls at the same time, interleaved at every possible place.

The first call runs up to one of its steps, the second one up to the beginning of one of its lines, then the first runs
on to its end, then the second. All pairs of places are tried, so interference between two threads that happens once in
a thousand runs happens here every time.
"""
from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from types import FrameType
from typing import Any

from book.checks.verdict import CheckFailed, agree, require
from book.launch.where import Place, place_of
from book.tap.place import is_learners

LIMIT_S = 10.0  # for two calls that are not stopped any more
PATIENCE_S = 0.1  # a thread silent for this long must be waiting for another kind of lock; shorter after the first time


class TellingLock:
    """An RLock that tells a `Stoppable` thread's `quiet` that the thread has to wait for it."""

    def __init__(self) -> None:
        self.inner = threading.RLock()

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        if self.inner.acquire(blocking=False):
            return True
        thread = threading.current_thread()
        if isinstance(thread, Stoppable) and blocking:
            thread.quiet.set()
        return blocking and self.inner.acquire(timeout=timeout)

    def release(self) -> None:
        self.inner.release()

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *error: object) -> None:
        self.release()


class Stoppable(threading.Thread):
    """A call in a thread that stops before its step `stop` in a learner's code, counted from 0, until `go` is set.

    A step is an instruction of the interpreter, or a line if `by_line`. `quiet` is set when it has stopped or ended, or
    has to wait for a `TellingLock`.
    """

    def __init__(self, call: Callable[[], Any], stop: int, by_line: bool) -> None:
        super().__init__(daemon=True)
        self.call, self.left, self.event = call, stop, "line" if by_line else "opcode"
        self.quiet, self.go = threading.Event(), threading.Event()
        self.place: Place | None = None  # where it has stopped
        self.result: Any = None

    def run(self) -> None:
        sys.settrace(self._called)
        try:
            self.result = self.call()
        except Exception as error:
            self.result = error
        finally:
            sys.settrace(None)
            self.quiet.set()

    def _called(self, frame: FrameType, event: str, _: Any) -> Any:
        if not is_learners(frame.f_code.co_filename):
            return None
        frame.f_trace_opcodes = True
        return self._stepped

    def _stepped(self, frame: FrameType, event: str, _: Any) -> Any:
        if event == self.event and not self.go.is_set():
            self.left -= 1
            if self.left == -1:
                self.place = place_of(frame.f_code.co_filename, frame.f_lineno)
                self.quiet.set()
                self.go.wait(LIMIT_S)
        return self._stepped


@dataclass(frozen=True)
class Encounter:
    """Two calls on `server` at the same time: where the first one stopped, and where the second one did, if it
    stopped."""

    server: Any
    results: Sequence[Any]  # what each call returned, or the exception that it raised
    places: Sequence[Place | None]


def encounters(make: Callable[[], Any], calls: Sequence[Callable[[Any], Any]]) -> Iterator[Encounter]:
    """All encounters of two calls on servers that `make` makes; their `lock` is replaced by a `TellingLock`.

    Raises CheckFailed where both calls wait for each other.
    """
    patience_s, stop = PATIENCE_S, 0
    while True:
        line, stopped = 0, True
        while stopped:
            server = make()
            server.lock = TellingLock()
            first = Stoppable(partial(calls[0], server), stop, by_line=False)
            second = Stoppable(partial(calls[1], server), line, by_line=True)
            first.start()
            first.quiet.wait(LIMIT_S)
            if first.place is None:
                return
            if not _go_on(first, second, patience_s):
                patience_s = PATIENCE_S / 5
            yield Encounter(server, [first.result, second.result], [first.place, second.place])
            line, stopped = line + 1, second.place is not None
        stop += 1


def _go_on(first: Stoppable, second: Stoppable, patience_s: float) -> bool:
    """Let `first`, which has stopped, and then `second` run to their ends; returns whether no wait has timed out."""
    first.quiet.clear()
    second.start()
    told = second.quiet.wait(patience_s)
    first.go.set()
    told &= first.quiet.wait(patience_s)
    second.go.set()
    for thread in (first, second):
        thread.join(LIMIT_S)
        require(not thread.is_alive(), "two calls at the same time wait for each other, and the server stands still. "
                f"One of them stopped at {first.place}")
    return told


def as_if_in_turn(make: Callable[[], Any], calls: Sequence[Callable[[Any], Any]],
                  seen: Callable[[Any, Sequence[Any]], Sequence[Any]]) -> None:
    """Two calls at the same time must leave the same state as one after the other, in either order.

    `seen(server, results)` lists what is to be compared: tensors, numbers, and None for what is missing. What must hold
    in any case it may check itself.
    """
    in_turn = []
    for order in ((0, 1), (1, 0)):
        server = make()
        results = {place: calls[place](server) for place in order}
        in_turn.append(seen(server, [results[0], results[1]]))
    for met in encounters(make, calls):
        why = _why_not(met, in_turn, seen)
        if why:
            one, other = met.places
            raise CheckFailed(f"two pushes come at the same time: when one is at {one}, the other "
                              + (f"comes to {other}" if other else "is served") + f". Then {why}. Hold self.lock from "
                              "the first read of what they share to the last change of it")


def _why_not(met: Encounter, in_turn: Sequence[Sequence[Any]], seen: Callable[[Any, Sequence[Any]], Sequence[Any]]
             ) -> str:
    """What is wrong after an encounter; "" if nothing."""
    for result in met.results:
        if isinstance(result, Exception):
            return f"one of them raises {_in_short(result)}"
    try:
        got = seen(met.server, met.results)
    except CheckFailed as failed:
        return str(failed)
    except Exception as error:  # the server is broken after the encounter
        return f"the next push raises {_in_short(error)}"
    if any(_alike(got, want) for want in in_turn):
        return ""
    if _num_missing(got) > max(map(_num_missing, in_turn)):
        return "one of them gets no answer"
    return "the result is not what they leave one after the other, in either order"


def _in_short(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".split(". ")[0].rstrip(".")


def _num_missing(things: Sequence[Any]) -> int:
    return sum(thing is None for thing in things)


def _alike(got: Sequence[Any], want: Sequence[Any]) -> bool:
    return len(got) == len(want) and all(
        (one is None) == (other is None) and (one is None or agree(one, other)) for one, other in zip(got, want))
