"""L2: the requests that a tapped process group returns, which tell when the program has waited for them."""
from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed import Work

from book.tap.log import LOG, Op
from book.tap.replaced import uncompiled


class _Telling:
    """A request that tells when the program has waited for it, not when it completes: that varies between runs."""

    __slots__ = ()
    _work: Any
    ops: Any
    is_open: Any

    def wait(self, *args: Any, **options: Any) -> bool:
        for op in self.ops:
            for waits in LOG.waits:
                waits(op)
        try:
            done = self._work.wait(*args, **options)  # a waiting rank is recognized by the name `wait` on its line
        except Exception:
            self.is_open = False  # the program knows what became of it
            raise
        self._waited()
        return done

    def is_completed(self) -> bool:
        done = self._work.is_completed()
        if done:
            self._waited()
        for op in self.ops:
            op.polled_s = time.monotonic()
        return done

    def synchronize(self) -> None:
        self._work.synchronize()
        self._waited()

    def block_current_stream(self) -> None:
        self._work.block_current_stream()
        self._waited()

    def get_future(self) -> torch.futures.Future:
        """The backend's future; if the program waits on that, only the time of completion is told."""
        future = self._work.get_future()
        self.is_open = False
        for op in self.ops:
            for left in LOG.left:
                left(op)
        _completes(self.ops, future)
        return future

    def _waited(self) -> None:
        self.is_open = False
        for op in self.ops:
            op.waited = True
            for waited in LOG.waited:
                waited(op, self._work._source_rank)


for _method in ("wait", "is_completed", "synchronize", "block_current_stream", "get_future"):
    uncompiled(getattr(_Telling, _method))


class TapWork(_Telling, Work):
    """A request that C++ can wait for too."""

    __slots__ = ("_work", "is_open", "ops")

    def __init__(self, work: Work, ops: Sequence[Op]):
        Work.__init__(self)
        self._work, self.ops = work, ops
        self.is_open = True  # until the program knows that it is done


def _delegated(method: str) -> Callable[..., Any]:
    return lambda self, *args, **options: getattr(self._work, method)(*args, **options)


for _name in ("is_success", "exception", "source_rank", "_source_rank", "result", "get_future_result",
              "_get_op_type", "_get_duration"):
    if hasattr(Work, _name):
        setattr(TapWork, _name, _delegated(_name))


class Request(_Telling):
    """The request of a send or a receive, whose message may be lost if Python deletes it before it is done.

    It only looks like a `Work`: to make one takes as long as a tenth of a short message.
    """

    __slots__ = ("__weakref__", "_work", "is_open", "ops")

    def __init__(self, work: Work, ops: Sequence[Op]):
        self._work, self.ops, self.is_open = work, ops, True

    __class__ = property(lambda self: Work)  # for isinstance

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)

    def __del__(self) -> None:
        if self.is_open:
            for dropped in LOG.dropped:
                dropped(self.ops[0])


def wrapped(work: Work | None, ops: Sequence[Op]) -> Work | None:
    """What a backend returned for these operations, as a request that tells; None if it returned none."""
    if work is None:
        for op in ops:  # the call was synchronous: there is no request to wait for
            op.waited = True
            for waited in LOG.waited:
                waited(op, None)
        return None
    if LOG.follows and any([follows(op) for follows in LOG.follows for op in ops]):
        try:
            _completes(ops, work.get_future())
        except RuntimeError:
            pass  # gloo has no future for reduce_scatter
    return TapWork(work, ops)


def _completes(ops: Sequence[Op], future: torch.futures.Future) -> None:
    for op in ops:
        for completes in LOG.completes:
            completes(op, future)
