"""L2: what a rank is doing, as the thread that answers the launcher sees it, and how long it has stood still."""
from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from types import FrameType
from typing import Any, NamedTuple

from book import tap
from book.audit import Notes
from book.launch import blocked, children, destroyed, history, left_out, pending, requests, rpc, stacks, threads, where
from book.launch.stacks import StackLine
from book.tap.place import is_learners
from book.waiting.doing import Doing, Kind
from book.waiting.hang import Dropped, Standing, Thread


class Report(NamedTuple):
    """What a rank is doing, and what it has recorded and noted so far."""
    standing: Standing
    recorded: Any
    notes: Notes | None


def report(recorded: Callable[[], Any], notes: Callable[[], Notes | None], polled: bool) -> Report:
    """This rank's report; `recorded()` returns what it has recorded, `notes()` what it has noted for the audit."""
    try:
        seen = _seen()
    except Exception:
        seen = Standing(Doing(Kind.SILENT))
    seen = seen._replace(polled=polled, dropped=_dropped(), sent=_sent(), messages=requests.messages(),
                         left_out=left_out.parameters(), destroyed=destroyed.groups())
    return Report(_with_history(seen), recorded(), notes())


def take_notes() -> None:
    """Have this process note, from now on, what its reports will say of the past."""
    for noted in (history.CallCounter(), requests.Requests(), left_out.Models(), destroyed.Destroyed()):
        tap.subscribe(noted)


def _with_history(seen: Standing) -> Standing:
    try:
        return seen._replace(calls=history.calls(), models=history.models())
    except Exception:  # a thread that goes on calls has changed what was read, or its source is not as expected
        return seen


def _dropped() -> list[Dropped]:
    return [Dropped(request.call, request.peer, str(where.place_of(request.filename, request.line)))
            for request in requests.dropped()]


def _sent() -> list[tuple[int, str]]:
    return [(peer, str(where.place_of(*place))) for peer, place in requests.sent()]


def _seen() -> Standing:
    """What the threads are doing; reads only frames of idle threads (see stacks)."""
    main = threading.main_thread().ident
    assert main is not None  # it has started
    main_stands, all_stand = threads.stand_still()
    lines = stacks.of_threads()
    frames = sys._current_frames() if all_stand else {main: sys._current_frames()[main]} if main_stands else {}
    worker = rpc.worker(lines, lambda ident: _served(ident, lines, frames))
    doing = _doing(main, lines, frames)
    seen = Standing(doing if doing.waits else _polls() or doing, str(where.own_place(lines[main])), worker=worker)
    if where.communicates(lines[main]):
        return seen
    return seen._replace(children=children.doing(), threads=tuple(
        Thread(name, _doing(ident, lines, frames), str(where.own_place(lines[ident])), where.communicates(lines[ident]))
        for ident, name in _threads_of_the_learner(lines).items()))


def _polls() -> Doing | None:
    """What this rank asks for again and again, if it does nothing else."""
    request = requests.polled()
    return request and Doing(Kind.POLLS, request.call, *pending.peer(
        request.call, *(request.peer if request.call == name else None for name in ("irecv", "isend"))))


def _doing(thread: int, lines: Mapping[int, Sequence[StackLine]], frames: Mapping[int, FrameType]) -> Doing:
    """What a thread is doing, in more detail if it is idle and `frames` has its innermost frame."""
    if thread not in frames:
        return where.doing_at(lines[thread])
    return _doing_in(where.stack(frames[thread]))


def _doing_in(stack: list[FrameType]) -> Doing:
    doing = where.doing(stack)
    return blocked.describe(stack) if doing.kind is Kind.COMPUTES and threads.are_known() else doing


def _served(thread: int, lines: Mapping[int, Sequence[StackLine]], frames: Mapping[int, FrameType]) -> Doing:
    """What the call that a thread serves is doing; it is not known whether it computes."""
    inner = rpc.called(lines[thread])
    doing = _doing_in(where.stack(frames[thread])[-len(inner):]) if thread in frames else where.doing_at(inner)
    return Doing(Kind.UNKNOWN) if doing.kind is Kind.COMPUTES else doing


def _threads_of_the_learner(lines: Mapping[int, Sequence[StackLine]]) -> dict[int, str]:
    """Names of the threads that the learner's code has started, by identifier, sorted by name."""
    started = {thread.ident: thread.name for thread in threading.enumerate()
               if thread not in (threading.main_thread(), threading.current_thread())}
    return {ident: name for ident, name in sorted(started.items(), key=lambda item: item[1])
            if ident is not None and ident in lines and not rpc.serves(lines[ident])
            and any(is_learners(line.filename) for line in lines[ident])}


def _may_wait_forever(main: int, lines: Mapping[int, Sequence[StackLine]]) -> bool:
    """Whether the main thread, if it uses no CPU time, waits for other ranks or for threads that wait themselves.

    A Timer and a thread that reads a file will go on by themselves. Child processes may too (see `children`).
    """
    if where.communicates(lines[main]):
        return True
    own = [lines[ident] for ident in (main, *_threads_of_the_learner(lines))]
    return (all(where.communicates(line) or blocked.without_limit(line) or children.waits_for(line) for line in own)
            and not any(map(blocked.with_limit, lines.values())))


# A rank that joins looks up the name of the store's address, to show it in errors. A name server that does not answer
# is given up after 5 s, and the other ranks wait for this one meanwhile.
LOOK_UP_S = 6.0


class Stillness:
    """How long this rank has waited in the same call.

    The main thread's CPU clock distinguishes one wait from the next: a blocked thread uses no CPU time.
    """

    def __init__(self) -> None:
        self.polled = False  # since then, see threads.polled
        self._mark: tuple[Any, ...] | None = None
        self._since_s = 0.0
        self._used: dict[int, threads.ThreadUse] = {}
        self._queue: dict[int, tuple[bool, int]] = {}
        self._family = children.ChildrenStillness()
        self._joins = False  # whether the main thread is in init_process_group

    def measure_s(self) -> float:
        """Seconds since this rank last made progress, if it waits in communication; 0.0 if it makes progress."""
        now_s, mark = time.monotonic(), self._current_mark()
        used = threads.used() if mark is not None else {}
        if mark is None or mark != self._mark or threads.worked(self._used, used, now_s - self._since_s):
            self._mark, self._since_s, self._used = mark, now_s, used
        self.polled = threads.polled(self._used, used, now_s - self._since_s)
        if mark is not None and mark[-1] and not self._family.lasts(mark, now_s - self._since_s):
            return 0.0
        return max(0.0, now_s - self._since_s - (LOOK_UP_S if self._joins else 0.0))

    def _current_mark(self) -> tuple[Any, ...] | None:
        if not hasattr(time, "pthread_getcpuclockid"):
            return None  # macOS: a hang is then reported at the time limit
        main, lines = threading.main_thread().ident, stacks.of_threads()
        self._joins = any(line.function == "init_process_group" for line in lines.get(main or 0, ()))
        if main not in lines or not _may_wait_forever(main, lines):
            return None
        # Another thread may be asleep in a remote call for a peer. It will wake up and continue.
        if any(where.sleeps(other) for thread, other in lines.items() if thread != threading.get_ident()):
            return None
        if self._starves():
            return None  # a thread is waiting for a core on a loaded machine
        used = () if where.communicates(lines[main]) else children.used()
        if used is None:
            return None  # a process that this one has started makes progress
        return lines[main][-1], time.clock_gettime_ns(time.pthread_getcpuclockid(main)), used

    def _starves(self) -> bool:
        """Whether a thread of this process is runnable and has not run since the last look.

        Being runnable is not enough: gloo's threads wake up 100 times a second, and on a loaded machine they queue for
        a core most of the time.
        """
        before, self._queue = self._queue, threads.queue()
        return any(runnable and before.get(thread, (False, turns))[1] == turns
                   for thread, (runnable, turns) in self._queue.items() if thread != threading.get_native_id())
