"""L0: one move, and steps that follow a rule, kept as the rule until somebody asks for their moves.

A ring all-reduce of 16,384 ranks has 537 million moves, but each of its steps sends between the same ranks; only the
chunks differ. So a `Phase` keeps who sends to whom, and a function that says which chunks. Shapes: S steps, M messages
in each, C chunks in a message.
"""
from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from book.columns import ABSENT, ColumnError, Columns, concatenate, count, word

OPS = ("reduce", "copy")


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


@dataclass(frozen=True)
class Phase:
    """Steps of messages with equally many chunks, `num_chunks`; `op` is what a receiver does with each.

    `src` and `dst` are (M,), or (S, M) where they change from step to step. `chunks(step)` gives the chunks for an
    array of steps (S, 1, 1), counted from 0; its result broadcasts to (S, M, C).
    """

    op: str
    src: np.ndarray
    dst: np.ndarray
    chunks: Callable[[np.ndarray], np.ndarray]
    num_chunks: int = 1
    num_steps: int = 1

    def moves(self, first: int) -> Columns:
        """All moves, where the phase's first step is step `first`."""
        step = np.arange(self.num_steps)[:, None, None]
        return moves_of(first + step, self.src[..., None], self.dst[..., None], self.chunks(step), self.op)

    def rounds(self) -> Iterator[Round]:
        """Its steps, those that are alike as one round."""
        if self.src.ndim == self.dst.ndim == 1:
            if self.num_steps and len(self.src):
                yield self._round(self.src, self.dst, self.num_steps)
            return
        for src, dst in zip(*np.broadcast_arrays(self.src, self.dst)):
            yield self._round(src, dst, 1)

    def _round(self, src: np.ndarray, dst: np.ndarray, num_steps: int) -> Round:
        num_chunks = np.full(len(src), self.num_chunks)
        return Round(src, dst, num_chunks, num_chunks if self.op == "reduce" else np.zeros_like(num_chunks), num_steps)


class Phases(tuple[Phase, ...]):
    """Phases of a schedule, each behind the last step of the one before it."""

    @property
    def num_steps(self) -> int:
        """The steps of all of them."""
        return sum(phase.num_steps for phase in self)

    def moves(self) -> Columns:
        """All their moves, in the order of the steps."""
        moves, first = [moves_of(0, 0, 0, np.zeros(0, dtype=np.int32), "copy")], 0
        for phase in self:
            moves.append(phase.moves(first))
            first += phase.num_steps
        return concatenate(moves)

    def rounds(self) -> Iterator[Round]:
        """All their rounds."""
        for phase in self:
            yield from phase.rounds()


def moves_of(step: np.ndarray | int, src: np.ndarray | int, dst: np.ndarray | int, chunk: np.ndarray,
             op: str) -> Columns:
    """Moves with one `op` from arrays that broadcast to one shape, in the order of that shape."""
    columns = np.broadcast_arrays(step, src, dst, chunk)
    arrays = {name: np.ascontiguousarray(column, dtype=np.int32).ravel()
              for name, column in zip(("step", "src", "dst", "chunk"), columns)}
    arrays["op"] = np.full(columns[0].size, OPS.index(op), dtype=np.int16)
    return Columns(Move, arrays, {"op": OPS})
