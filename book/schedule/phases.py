"""L0: one move, and schedules that are written as loops over steps and ranks.

A ring all-reduce of 16,384 ranks has 537 million moves. So a `Phase` keeps the loops until somebody asks for moves, and
`every` has the loop over ranks run once, for all of them: with `range` in its place, the same loops give the same moves
one by one. Shapes: M messages in a step, C chunks in each.
"""
from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import wraps
from itertools import chain, groupby
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np

from book.columns import ABSENT, ColumnError, Columns, concatenate, count, word

OPS = ("reduce", "copy")
Numbers = int | np.ndarray
# Step, src, dst, chunk, op: of a message or many.
Loops = Iterator[tuple[int, Numbers, Numbers, "Numbers | ChunkRange", str]]


class ScheduleError(ValueError):
    """An invalid schedule: it names a rank or chunk that does not exist, or does not keep its promise.

    `waits` says, of a pipeline's order that cannot run, what each rank that is stuck waits for.
    """

    waits: tuple[str, ...] = ()


@dataclass(frozen=True)
class Move:
    """One chunk going from rank `src` to rank `dst` in one step; `op` is "reduce" (add) or "copy" (replace).

    `into` is the receiver's chunk that it lands in, None where that has the same number.
    """

    step: int = count()
    src: int = count()
    dst: int = count()
    chunk: int = count()
    op: str = word()
    into: int | None = count(default=None)

    def __post_init__(self) -> None:
        if self.into == ABSENT:  # as a column it would be None
            raise ColumnError("into must be the number of a chunk or None, not -1")


class Round(NamedTuple):
    """The messages of a step: from whom, to whom, how many chunks, and how many of these are added there; (M,) each.

    So many steps in a row, `num_steps`, have just these messages.
    """

    src: np.ndarray
    dst: np.ndarray
    num_chunks: np.ndarray
    num_added: np.ndarray
    num_steps: int = 1


def every(num_ranks: int) -> Iterator[np.ndarray]:
    """All ranks at once: `for rank in every(n)` does what `for rank in range(n)` does, for an array of ranks, (n,)."""
    if num_ranks:
        yield np.arange(num_ranks, dtype=np.int32)


class ChunkRange(NamedTuple):
    """Chunks that travel in one message: `length` of them, from `first` on, a number for each message.

    It does not wrap around: `first + length` is at most the number of chunks.
    """

    first: Numbers
    length: int


class Messages(NamedTuple):
    """The messages of a step: from whom, to whom, the first chunk of each, (M,), how many it has, and what is done."""

    src: np.ndarray
    dst: np.ndarray
    first: np.ndarray
    num_chunks: int
    op: str

    def moves(self, step: int) -> Columns:
        """The moves that they are made of."""
        chunks = self.first[:, None] + np.arange(self.num_chunks, dtype=np.int32)
        return moves_of(step, self.src[:, None], self.dst[:, None], chunks, self.op)

    def with_all(self, others: list[Messages]) -> Messages:
        """These, and behind them others of the same step; raises ScheduleError where those are of another kind."""
        for other in others:
            if (other.op, other.num_chunks) != (self.op, self.num_chunks):
                raise ScheduleError("what a phase yields of one step has one op and one number of chunks, not "
                                    f"{self.op!r} of {self.num_chunks} and {other.op!r} of {other.num_chunks}: "
                                    "yield the second in a phase of its own")
        src, dst, first = (np.concatenate([getattr(one, name) for one in (self, *others)])
                           for name in ("src", "dst", "first"))
        pairs, counts = np.unique(np.stack([src, dst]), axis=1, return_counts=True)
        if (counts > 1).any():  # each would be timed as a message, though a rank sends all chunks of a step in one
            one, other = pairs[:, counts > 1][:, 0]
            raise ScheduleError(f"what a phase yields of one step has two messages from rank {one} to rank {other}: "
                                "yield their chunks in one, as a ChunkRange")
        return self._replace(src=src, dst=dst, first=first)

    def is_like(self, other: Messages) -> bool:
        """Whether another step's are the same but for the chunks' numbers."""
        return (self.op, self.num_chunks) == (other.op, other.num_chunks) and (
            np.array_equal(self.src, other.src) and np.array_equal(self.dst, other.dst))

    def times(self, num_steps: int) -> Round:
        """So many such steps."""
        num_chunks = np.full(len(self.src), self.num_chunks)
        num_added = num_chunks if self.op == "reduce" else np.zeros_like(num_chunks)
        return Round(self.src, self.dst, num_chunks, num_added, num_steps)


@dataclass(frozen=True)
class Phase:
    """Loops that yield the messages of steps, counted from 0, kept with their arguments until they are asked for.

    What they yield is (step, src, dst, chunk, op); `op` is what a receiver does with the chunk. `src`, `dst` and
    `chunk` may be arrays, (M,), of as many messages, and `chunk` a `ChunkRange`, for messages of several chunks.
    What is yielded of one step has one `op` and one number of chunks.
    """

    loops: Callable[..., Loops]
    sizes: tuple[Any, ...]

    def steps(self) -> Iterator[Messages]:
        """The messages of each step."""
        for _, yielded in groupby(self.loops(*self.sizes), key=itemgetter(0)):
            first, *more = [_messages(src, dst, chunk, op) for _, src, dst, chunk, op in yielded]
            yield first.with_all(more) if more else first


def phase(loops: Callable[..., Loops]) -> Callable[..., Phase]:
    """Turn a function that yields messages into one that returns them as a `Phase`."""
    @wraps(loops)
    def made(*sizes: Any) -> Phase:
        return Phase(loops, sizes)

    return made


class Phases(tuple[Phase, ...]):
    """Phases of a schedule, each behind the last step of the one before it."""

    @property
    def num_steps(self) -> int:
        """The steps of all of them."""
        return sum(one.num_steps for one in self.rounds())

    def moves(self) -> Columns:
        """All their moves, in the order of the steps."""
        none = moves_of(0, 0, 0, np.zeros(0, dtype=np.int32), "copy")
        return concatenate([none, *(messages.moves(step) for step, messages in enumerate(self._steps()))])

    def rounds(self) -> Iterator[Round]:
        """All their rounds: steps in a row that are alike are one."""
        last, num_steps = None, 0
        for messages in self._steps():
            if last is not None and not messages.is_like(last):
                yield last.times(num_steps)
                num_steps = 0
            last, num_steps = messages, num_steps + 1
        if last is not None:
            yield last.times(num_steps)

    def _steps(self) -> Iterator[Messages]:
        return chain.from_iterable(phase.steps() for phase in self)


def _messages(src: Numbers, dst: Numbers, chunk: Numbers | ChunkRange, op: str) -> Messages:
    """What loops yield of a step, all of it in arrays."""
    chunks = chunk if isinstance(chunk, ChunkRange) else ChunkRange(chunk, 1)
    src, dst, first = np.broadcast_arrays(*map(np.atleast_1d, (src, dst, chunks.first)))
    return Messages(src, dst, first, chunks.length, op)


def moves_of(step: np.ndarray | int, src: np.ndarray | int, dst: np.ndarray | int, chunk: np.ndarray,
             op: str) -> Columns:
    """Moves with one `op` from arrays that broadcast to one shape, in the order of that shape."""
    columns = np.broadcast_arrays(step, src, dst, chunk)
    arrays = {name: np.ascontiguousarray(column, dtype=np.int32).ravel()
              for name, column in zip(("step", "src", "dst", "chunk"), columns)}
    arrays["op"] = np.full(columns[0].size, OPS.index(op), dtype=np.int16)
    return Columns(Move, arrays, {"op": OPS})
