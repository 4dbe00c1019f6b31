"""L0: schedules as plain data: who sends which chunk to whom at which step.

A rank's buffer is cut into `num_chunks` chunks. In a step every rank sends what it held when the step began; what
arrives is added into the receiver's chunk ("reduce") or replaces it ("copy"). Moves of one step with the same sender
and receiver travel as one message. Shapes below: R ranks, C chunks, K contributions (one per rank, so K = R).
"""
from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from book.columns import Columns, ColumnError, count, word
from book.promise import PROMISES, promised_by

OPS = ("reduce", "copy")


class ScheduleError(ValueError):
    """A schedule that cannot be right: it names a rank or chunk that is not there, or does not keep its promise."""


@dataclass(frozen=True)
class Move:
    """One chunk going from rank `src` to rank `dst` in one step; `op` is "reduce" (add) or "copy" (replace)."""

    step: int = count()
    src: int = count()
    dst: int = count()
    chunk: int = count()
    op: str = word()


class Schedule:
    """A named list of moves over `world_size` ranks whose buffers have `num_chunks` chunks.

    `moves` is any iterable of `Move` (or of tuples in its order), kept as NumPy columns ordered by step; moves of one
    step keep the order they were given in. `promise` says what must hold at the end: "all_reduce" (every rank holds
    every chunk with every contribution once), "reduce_scatter" (rank r holds chunk r+1 so), "all_gather" (every rank
    holds every chunk of its owner). By default it is read off the end of `name`, and is "all_reduce" otherwise.
    Raises ScheduleError when a move names a step, rank, chunk or op that cannot be.
    """

    def __init__(self, name: str, world_size: int, num_chunks: int, moves: Iterable[Move], promise: str | None = None):
        if not isinstance(name, str) or not name.isidentifier():
            raise ScheduleError(f"a schedule's name is letters, digits and underscores, not {name!r}")
        check_counts(world_size=world_size, num_chunks=num_chunks)
        self.name, self.world_size, self.num_chunks = name, int(world_size), int(num_chunks)
        self.promise = promise or promised_by(name)
        if self.promise not in PROMISES:
            raise ScheduleError(f"unknown promise {self.promise!r}: use one of {', '.join(PROMISES)}")
        try:
            self.moves: Columns = _by_step(Columns.from_rows(Move, moves))
        except ColumnError as error:
            raise ScheduleError(f"{name}: {error}") from error
        self._check_ranges()

    def __repr__(self) -> str:
        size = f"{self.world_size} ranks, {self.num_chunks} chunks"
        return f"<Schedule {self.name}: {size}, {self.num_steps} steps, {len(self.moves)} moves>"

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Schedule):
            return NotImplemented
        mine, theirs = (
            (s.name, s.world_size, s.num_chunks, s.promise, list(s.moves)) for s in (self, other)
        )
        return mine == theirs

    __hash__ = None  # type: ignore[assignment]

    @property
    def num_steps(self) -> int:
        """How many steps the schedule has: one more than its last step (0 without moves)."""
        return int(self.moves.array("step")[-1]) + 1 if len(self.moves) else 0

    def sent_bytes(self, num_bytes: float) -> np.ndarray:
        """Bytes that each rank sends when the whole buffer has `num_bytes`, shape (R,)."""
        num_sent = np.bincount(self.moves.array("src"), minlength=self.world_size) if len(self.moves) else np.zeros(
            self.world_size)
        return num_sent * (num_bytes / self.num_chunks)

    def steps(self) -> Iterator[np.ndarray]:
        """The positions in `moves` that belong to each step that has any, in order."""
        if len(self.moves):
            step = self.moves.array("step")
            yield from np.split(np.arange(len(step)), np.flatnonzero(np.diff(step)) + 1)

    def start(self) -> np.ndarray:
        """Whose contributions each rank holds before the first step, counts of shape (R, C, K)."""
        return PROMISES[self.promise].start(self.world_size, self.num_chunks)

    def replay(self, held: np.ndarray | None = None) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """Moves contributions as the schedule says, changing `held` (default: `start()`) in place.

        Yields, move by move or many at once where they do not touch the same chunk: positions in `moves`, shape (M,),
        the contributions in each message, (M, K), and those that the receiver's chunk holds afterwards, (M, K).
        """
        held = self.start() if held is None else held
        src, dst, chunk = (self.moves.array(name) for name in ("src", "dst", "chunk"))
        is_copy = self.moves.mask("op", "copy")
        for rows in self.steps():
            sent = held[src[rows], chunk[rows]]  # fancy indexing copies: what every rank held as the step began
            order = _occurrence(dst[rows] * self.num_chunks + chunk[rows])
            for turn in range(order.max() + 1):
                now = order == turn
                moves, message = rows[now], sent[now]
                where = dst[moves], chunk[moves]
                held[where] = np.where(is_copy[moves, None], message, held[where] + message)
                yield moves, message, held[where]

    def check(self) -> Schedule:
        """Replays every contribution and returns the schedule if its promise is kept.

        Raises ScheduleError naming the rank, chunk and contributions that are missing or counted more than once.
        """
        self._check_conflicts()
        held = self.start()
        for _ in self.replay(held):
            pass
        promise, size = PROMISES[self.promise], (self.world_size, self.num_chunks)
        goal = promise.goal(*size)
        for rank, chunk in np.argwhere(promise.where(*size) & (held != goal).any(axis=-1)):
            fault = contents_fault(held[rank, chunk], goal[rank, chunk])
            raise ScheduleError(f"{self.name}: at the end rank {rank} chunk {chunk} {fault}")
        return self

    def to_csv(self) -> str:
        """The schedule as text: a comment line with its head, a header, one line per move."""
        out = io.StringIO()
        out.write(f"# {self.name},{self.world_size},{self.num_chunks},{self.promise}\n")
        writer = csv.writer(out, lineterminator="\n")
        writer.writerow(("step", "src", "dst", "chunk", "op"))
        writer.writerows((m.step, m.src, m.dst, m.chunk, m.op) for m in self.moves)
        return out.getvalue()

    @classmethod
    def from_csv(cls, text: str) -> Schedule:
        """The schedule that `to_csv` wrote; raises ScheduleError when the text is something else."""
        head, _, body = text.partition("\n")
        try:
            name, world_size, num_chunks, promise = head.removeprefix("# ").split(",")
            rows = csv.DictReader(io.StringIO(body))
            moves = [Move(*(int(row[k]) for k in ("step", "src", "dst", "chunk")), row["op"]) for row in rows]
            return cls(name, int(world_size), int(num_chunks), moves, promise)
        except (KeyError, TypeError, ValueError) as error:
            if isinstance(error, ScheduleError):
                raise
            raise ScheduleError(f"this is not a schedule's CSV (write one with to_csv): {error}") from error

    def _check_ranges(self) -> None:
        limits = {"step": None, "src": self.world_size, "dst": self.world_size, "chunk": self.num_chunks}
        for name, limit in limits.items() if len(self.moves) else ():
            column = self.moves.array(name)
            bad = np.flatnonzero((column < 0) | (column >= limit if limit else False))
            if len(bad):
                allowed = f"0 to {limit - 1}" if limit else "0 or more"
                raise ScheduleError(f"{self.name}: move {bad[0]} has {name} {column[bad[0]]}, it must be {allowed}")
        for op in sorted({str(move) for move in self._ops()} - set(OPS)):
            raise ScheduleError(f"{self.name}: op must be 'reduce' or 'copy', not {op!r}")
        to_self = np.flatnonzero(self.moves.array("src") == self.moves.array("dst")) if len(self.moves) else ()
        if len(to_self):
            raise ScheduleError(f"{self.name}: {self.moves[to_self[0]]} goes from a rank to itself")

    def _ops(self) -> set[str | None]:
        """Every op that some move has."""
        if not len(self.moves):
            return set()
        words = (*self.moves.vocabularies["op"], None)  # a missing op is kept as -1
        return {words[code] for code in np.unique(self.moves.array("op"))}

    def _check_conflicts(self) -> None:
        """A copy and another move into the same chunk in one step: the result would depend on who comes first."""
        if not len(self.moves):
            return
        step, dst, chunk = (self.moves.array(name).astype(np.int64) for name in ("step", "dst", "chunk"))
        key = (step * self.world_size + dst) * self.num_chunks + chunk
        _, place, num_same = np.unique(key, return_inverse=True, return_counts=True)
        clash = np.flatnonzero((num_same[place] > 1) & self.moves.mask("op", "copy"))
        if len(clash):
            m = self.moves[clash[0]]
            raise ScheduleError(f"{self.name}: in step {m.step} rank {m.dst} chunk {m.chunk} gets a copy and another "
                                f"message: the result depends on which comes first")


def check_counts(**counts: int) -> None:
    """Raises ScheduleError unless every one of the named counts is a whole number of at least 1."""
    for name, value in counts.items():
        if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < 1:
            raise ScheduleError(f"{name} must be a whole number of at least 1, not {value!r}")


def contents_fault(held: np.ndarray, wanted: np.ndarray) -> str:
    """What is wrong with a chunk's contributions, (K,) against (K,), in words; "" when nothing is."""
    missing, extra = np.flatnonzero(held < wanted), np.flatnonzero(held > wanted)
    faults = []
    if len(missing):
        faults.append(f"lacks the contribution of {_ranks(missing)}")
    if len(extra):
        times = ", ".join(f"rank {k} ({held[k]:g} times)" if wanted[k] else f"rank {k} (not wanted)" for k in extra)
        faults.append(f"counts too often: {times}")
    return " and ".join(faults)


def _by_step(moves: Columns) -> Columns:
    if not len(moves):
        return moves
    step = moves.array("step")
    return moves if np.all(step[1:] >= step[:-1]) else moves.take(np.argsort(step, kind="stable"))


def _occurrence(keys: np.ndarray) -> np.ndarray:
    """For each key, how many equal keys stand before it, shape like `keys`."""
    order = np.argsort(keys, kind="stable")
    ordered = keys[order]
    first = np.r_[True, ordered[1:] != ordered[:-1]]
    since = np.arange(len(keys)) - np.maximum.accumulate(np.where(first, np.arange(len(keys)), 0))
    result = np.empty_like(since)
    result[order] = since
    return result


def _ranks(numbers: np.ndarray) -> str:
    names = ", ".join(str(n) for n in numbers)
    return f"rank {names}" if len(numbers) == 1 else f"ranks {names}"
