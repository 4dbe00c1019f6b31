"""L0: collectives as plain data: who sends which chunk to whom at which step.

A rank's buffer is cut into `num_chunks` chunks. In a step every rank sends what it held when the step began; what
arrives is added into the receiver's chunk ("reduce") or replaces it ("copy"): the chunk of the same number, unless the
move says another. Moves of one step with the same sender and receiver travel as one message. Shapes below: R ranks,
C chunks, K contributions (one per rank, so K = R).
"""
from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Iterator
from functools import cached_property

import numpy as np

from book.columns import ABSENT, Columns, ColumnError
from book.promise import PROMISES
from book.schedule.phases import OPS, Move, Phases, ScheduleError
from book.words import listed, plural


class Schedule:
    """A named list of moves over `world_size` ranks whose buffers have `num_chunks` chunks.

    `moves` is any iterable of `Move` (or of tuples in its order), kept as NumPy columns ordered by step; moves of one
    step keep the order they were given in. `Phases` are turned into moves on first access. `promise` names an entry of
    `book.promise.PROMISES`, which says what is held at the start and must be at the end: "all_reduce" (every rank holds
    every chunk with every contribution once), "reduce_scatter" (rank r holds chunk r+1 so), "broadcast" (every rank
    holds rank 0's data) and so on. It has to be stated: a name promises nothing. Raises ScheduleError when the promise
    is missing or unknown, or a move names an invalid step, rank, chunk or op.
    """

    def __init__(self, name: str, world_size: int, num_chunks: int, moves: Iterable[Move] | Phases,
                 promise: str | None = None):
        if not isinstance(name, str) or not name.isidentifier():
            raise ScheduleError(f"a schedule's name is letters, digits and underscores, not {name!r}")
        check_counts(world_size=world_size, num_chunks=num_chunks)
        self.name, self.world_size, self.num_chunks = name, int(world_size), int(num_chunks)
        self.promise = _stated(name, promise)
        self.phases = moves if isinstance(moves, Phases) else None
        if not isinstance(moves, Phases):
            try:
                self.moves = _by_step(_plain(Columns.from_rows(Move, moves)))
            except ColumnError as error:
                raise ScheduleError(f"{name}: {error}") from error
            self._check_ranges()

    @cached_property
    def moves(self) -> Columns:
        """All moves, ordered by step."""
        return Phases(self.phases or ()).moves()

    def __repr__(self) -> str:
        size = f"{self.world_size} ranks, {self.num_chunks} chunks"
        return f"<Schedule {self.name}: {size}, {self.num_steps} steps, {self.num_moves} moves>"

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
        if self.phases is not None:
            return self.phases.num_steps
        return int(self.moves.array("step")[-1]) + 1 if len(self.moves) else 0

    @property
    def num_moves(self) -> int:
        """How many moves the schedule has."""
        if self.phases is not None:
            return sum(one.num_steps * int(one.num_chunks.sum()) for one in self.phases.rounds())
        return len(self.moves)

    def into(self) -> np.ndarray:
        """The receiver's chunk that each move lands in, shape (moves,)."""
        if not len(self.moves):
            return np.zeros(0, dtype=np.int32)
        chunk = self.moves.array("chunk")
        if not self.moves.has("into"):
            return chunk
        into = self.moves.array("into")
        return np.where(into == ABSENT, chunk, into)

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
        into, is_copy = self.into(), self.moves.mask("op", "copy")
        for rows in self.steps():
            sent = held[src[rows], chunk[rows]]  # fancy indexing copies: what every rank held as the step began
            order = _occurrence(dst[rows] * self.num_chunks + into[rows])
            for turn in range(order.max() + 1):
                now = order == turn
                moves, message = rows[now], sent[now]
                where = dst[moves], into[moves]
                held[where] = np.where(is_copy[moves, None], message, held[where] + message)
                yield moves, message, held[where]

    def check(self) -> Schedule:
        """Replays every contribution and returns the schedule if its promise is kept.

        Raises ScheduleError naming the rank, chunk and contributions that are missing or counted more than once, or
        that come from another chunk than they should.
        """
        self._check_ranges()  # of Phases too, whose moves nobody has looked at
        self._check_conflicts()
        promise, size = PROMISES[self.promise], (self.world_size, self.num_chunks)
        goal, where = promise.goal(*size), promise.where(*size)
        held = self._at_the_end(self.start())
        for rank, chunk in np.argwhere(where & (held != goal).any(axis=-1)):
            fault = contents_fault(held[rank, chunk], goal[rank, chunk])
            raise ScheduleError(f"{self.name}: at the end rank {rank} chunk {chunk} {fault}")
        self._check_source_chunks(goal, where, promise.source_chunk(*size))
        return self

    def to_csv(self) -> str:
        """The schedule as text: a comment line with its head, a header, one line per move."""
        out = io.StringIO()
        out.write(f"# {self.name},{self.world_size},{self.num_chunks},{self.promise}\n")
        writer = csv.writer(out, lineterminator="\n")
        names = ["step", "src", "dst", "chunk", "op"] + ["into"] * self.moves.has("into")
        writer.writerow(names)
        writer.writerows([getattr(move, name) for name in names] for move in self.moves)
        return out.getvalue()

    @classmethod
    def from_csv(cls, text: str) -> Schedule:
        """The schedule that `to_csv` wrote; raises ScheduleError when the text is something else."""
        head, _, body = text.partition("\n")
        try:
            name, world_size, num_chunks, promise = head.removeprefix("# ").split(",")
            rows = csv.DictReader(io.StringIO(body))
            moves = [Move(int(row["step"]), int(row["src"]), int(row["dst"]), int(row["chunk"]), row["op"],
                          int(row["into"]) if row.get("into") else None) for row in rows]
            return cls(name, int(world_size), int(num_chunks), moves, promise)
        except (KeyError, TypeError, ValueError) as error:
            if isinstance(error, ScheduleError):
                raise
            raise ScheduleError(f"this is not a schedule's CSV (write one with to_csv): {error}") from error

    def _at_the_end(self, held: np.ndarray) -> np.ndarray:
        for _ in self.replay(held):
            pass
        return held

    def _check_source_chunks(self, goal: np.ndarray, where: np.ndarray, source_chunk: np.ndarray) -> None:
        """Where each contribution is there just once, which of its rank's chunks it was.

        Contributions that carry their chunk's number instead of 1 end up as the number that they came from.
        """
        own = np.arange(self.num_chunks)
        if not self.moves.has("into") and (source_chunk == own).all():
            return
        came_from = self._at_the_end(self.start() * own.astype(np.int32)[:, None])
        for rank, chunk, k in np.argwhere(where[..., None] & (came_from != goal * source_chunk[..., None])):
            raise ScheduleError(f"{self.name}: at the end rank {rank} chunk {chunk} holds chunk "
                                f"{came_from[rank, chunk, k]} of rank {k}, not its chunk {source_chunk[rank, chunk]}")

    def _check_ranges(self) -> None:
        limits = {"step": None, "src": self.world_size, "dst": self.world_size, "chunk": self.num_chunks,
                  "into": self.num_chunks}
        for name, limit in limits.items() if len(self.moves) else ():
            column = self.into() if name == "into" else self.moves.array(name)
            bad = np.flatnonzero((column < 0) | (column >= limit if limit else False))
            if len(bad):
                allowed = f"0 to {limit - 1}" if limit else "0 or more"
                raise ScheduleError(f"{self.name}: move {bad[0]} has {name} {column[bad[0]]}, it must be {allowed}")
        for op in sorted({str(move) for move in self._ops()} - set(OPS)):
            raise ScheduleError(f"{self.name}: op must be 'reduce' or 'copy', not {op!r}")
        if not len(self.moves):
            return
        to_self = np.flatnonzero(self.moves.array("src") == self.moves.array("dst"))
        if len(to_self):
            raise ScheduleError(f"{self.name}: {self.moves[to_self[0]]} goes from a rank to itself")

    def _ops(self) -> set[str | None]:
        """Every op that some move has."""
        if not len(self.moves):
            return set()
        words = (*self.moves.vocabularies["op"], None)  # a missing op is kept as -1
        return {words[code] for code in np.unique(self.moves.array("op"))}

    def _check_conflicts(self) -> None:
        """A copy and another move into the same chunk in one step: the result would depend on which comes first."""
        if not len(self.moves):
            return
        step, dst = (self.moves.array(name).astype(np.int64) for name in ("step", "dst"))
        into = self.into()
        key = (step * self.world_size + dst) * self.num_chunks + into
        _, place, num_same = np.unique(key, return_inverse=True, return_counts=True)
        clash = np.flatnonzero((num_same[place] > 1) & self.moves.mask("op", "copy"))
        if len(clash):
            m = self.moves[clash[0]]
            raise ScheduleError(f"{self.name}: in step {m.step} rank {m.dst} chunk {into[clash[0]]} gets a copy and "
                                f"another message: the result depends on which comes first")


def check_counts(**counts: int) -> None:
    """Raises ScheduleError unless every one of the named counts is a whole number of at least 1."""
    for name, value in counts.items():
        if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < 1:
            raise ScheduleError(f"{name} must be a whole number of at least 1, not {value!r}")


def _stated(name: str, promise: str | None) -> str:
    """The promise, if it is one."""
    if promise is None:
        raise ScheduleError(f'{name}: state what this schedule promises, as in Schedule(..., promise="all_reduce"): '
                            f"one of {', '.join(PROMISES)}")
    if promise not in PROMISES:
        raise ScheduleError(f"unknown promise {promise!r}: use one of {', '.join(PROMISES)}")
    return promise


def contents_fault(held: np.ndarray, wanted: np.ndarray) -> str:
    """What is wrong with a chunk's contributions, (K,) against (K,), in words; "" when nothing is."""
    missing, extra = np.flatnonzero(held < wanted), np.flatnonzero(held > wanted)
    faults = []
    if len(missing):
        faults.append(f"lacks the contribution of {plural('rank', len(missing))} {listed(missing)}")
    if len(extra):
        times = ", ".join(f"rank {k} ({held[k]:g} times)" if wanted[k] else f"rank {k} (not wanted)" for k in extra)
        faults.append(f"counts too often: {times}")
    return " and ".join(faults)


def _plain(moves: Columns) -> Columns:
    """The moves with `into` only where it is another chunk, so that equal schedules are written alike."""
    if not moves.has("into"):
        return moves
    into = np.where(moves.array("into") == moves.array("chunk"), ABSENT, moves.array("into"))
    return moves.replace(into=into if (into != ABSENT).any() else None)


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
