"""L3: how a run of the chunk player ends, and where one that broke its promise first went wrong.

The right schedule that a wrong run is compared with is the one that it follows most nearly of the book's collectives
with the same promise, its chunks renumbered if the run begins with another one. It is replayed on what the run's chunks
held at the start. A chunk is wrong from the step on after which it never again holds what the right schedule has there.
"""
from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np

from book.collectives import COLLECTIVES
from book.promise import PROMISES, Promise, variants
from book.schedule import Schedule, contents_fault
from book.trace import Trace, parting
from book.trace_schema import CellLine
from book.widgets.player_run import ChunkRun, Contributions, Transfer
from book.widgets.player_words import ranks_named

NEARLY = 0.5  # a schedule with a smaller share of its messages in common with a run is not what the run meant
LARGEST = 16  # a right schedule is searched for only up to this many ranks and chunks


@dataclass(frozen=True)
class Fault:
    """A broken promise: the first wrong `step` (0: the start), what is wrong in words, and since when which chunks are.

    `cells` are [rank, chunk, step], earliest first. `right` is the run as it should have been, and `name` its
    schedule's; None if no schedule of the book is near enough. `line` is the line of the reader's cell that sent what
    the first of the cells should have got, "6 in step: dist.send(x, 1)", where that is known.
    """

    step: int
    says: str
    cells: list[list[int]]
    right: ChunkRun | None = None
    name: str | None = None
    line: CellLine | None = None


@dataclass(frozen=True)
class Ending:
    """What a run should end in, whether it does, and that in words; where it first went wrong, if that can be said."""

    promise: Promise
    ok: bool
    says: str
    fault: Fault | None = None


def ending(run: ChunkRun, trace: Trace, asked: str | None = None) -> Ending:
    """How a run ends: which chunk is wrong, if one is, or who waits for whom where its trace hangs.

    `asked` is the promise that it is held to; without one the trace's, or what it looks like. A run that calls
    collectives and has promised nothing is never called wrong.
    """
    promise, kept = _promised(run, trace, asked)
    if trace.hangs:
        return Ending(promise, False, f"Here the run hangs: {trace.hangs}.")
    where = promise.where(run.world_size, run.num_chunks)
    if kept[where].all():
        return Ending(promise, True, f"Done: {promise.says}.")
    if not (asked or trace.promise) and (run.called or not run.transfers):
        return Ending(promise, True, "")
    rank, chunk = (int(index) for index in np.argwhere(where & ~kept)[0])
    missed = _missed(run.final().get((rank, chunk)), promise.goal(run.world_size, run.num_chunks)[rank, chunk])
    done = f"{kept[where].sum()} of {where.sum()} chunks are complete"
    return Ending(promise, False, f"Wrong at the end: {done}. Rank {rank}'s chunk {chunk} {missed}.",
                  fault_of(run, promise, kept))


def _promised(run: ChunkRun, trace: Trace, asked: str | None) -> tuple[Promise, np.ndarray]:
    """What the run should end in, and where it does, bool (R, C): as `asked`, else as the trace says, else as it looks.

    A schedule's promise is taken literally. One that is only asked for may be kept with another root or other owners
    than in the book's schedules. A recorded program has promised nothing: if it calls collectives, it may end as an
    all-reduce or as one of them does; if it only copies, as an all-gather or a broadcast.
    """
    if trace.promise and asked in (None, trace.promise):
        promise = PROMISES[trace.promise]
        return promise, _kept(run, promise)
    names = [asked] if asked else _likely(run)
    judged = [(promise, _kept(run, promise)) for promise in variants(names[0], run.world_size)]
    others = ((promise, _kept(run, promise)) for name in names[1:] for promise in variants(name, run.world_size))
    best = max(judged, key=lambda one: one[1][one[0].where(*one[1].shape)].mean())
    return next((one for one in chain(judged, others) if one[1].all()), best)


def _likely(run: ChunkRun) -> list[str]:
    if run.called:
        return list(dict.fromkeys(["all_reduce", *(op for op in PROMISES if op in run.called)]))
    only_copies = run.transfers and all(t.op == "copy" for t in run.transfers)
    return ["all_gather", "broadcast"] if only_copies else ["all_reduce"]


def _kept(run: ChunkRun, promise: Promise) -> np.ndarray:
    """Which chunks end as promised, or as the mean of that, or without a promise about them: bool (R, C)."""
    final, size = run.final(), (run.world_size, run.num_chunks)
    unknown = (np.nan,) * run.world_size
    held = np.array([[final.get((r, c)) or unknown for c in range(run.num_chunks)] for r in range(run.world_size)])
    return _alike(held, promise.goal(*size)) | ~promise.where(*size)


def _missed(held: Contributions, wanted: np.ndarray) -> str:
    """What is wrong with a chunk that should hold `wanted`."""
    if held is None:
        return "holds something unknown"
    values = np.array(held)
    return contents_fault(values, wanted) if np.array_equal(values, np.rint(values)) else "is not a sum that is right"


def fault_of(run: ChunkRun, promise: Promise, kept: np.ndarray) -> Fault:
    """Where a run first went wrong that keeps its promise only in the chunks `kept`, bool (R, C)."""
    states = _states(run)  # (S+1, R, C, K)
    found = _nearest(run, promise)
    if found is None:
        goal = np.broadcast_to(promise.goal(run.world_size, run.num_chunks), states.shape)
        missed = np.argwhere(~kept & promise.where(*kept.shape)).tolist()
        # What is missing may still have come.
        return _fault(run, states, np.fmin(states, goal), _parted(states, goal, missed, lambda a, b: (a <= b).all()))
    name, right = found
    wanted = _states(right)[np.minimum(np.arange(run.num_steps + 1), right.num_steps)]
    return _fault(run, states, wanted, _parted(states, wanted, np.ndindex(kept.shape), _alike), right, name)


def _parted(states: np.ndarray, wanted: np.ndarray, chunks: Iterable[Sequence[int]],
            alike: Callable[[np.ndarray, np.ndarray], Any]) -> list[tuple[int, int, int]]:
    """Those of the `chunks`, [rank, chunk], that end otherwise than wanted: (step since when, rank, chunk)."""
    since = ((parting(states[:, r, c], wanted[:, r, c], alike, for_good=True), r, c) for r, c in chunks)
    return [(step, r, c) for step, r, c in since if step is not None]


def _fault(run: ChunkRun, states: np.ndarray, wanted: np.ndarray, wrong: list[tuple[int, int, int]],
           right: ChunkRun | None = None, name: str | None = None) -> Fault:
    """The fault, given the chunks that are `wrong`, each with the step since when."""
    told = {(t.dst, t.chunk if t.into is None else t.into): -place for place, t in enumerate(run.transfers)}
    cells = sorted(wrong, key=lambda cell: (
        cell[0], not _too_often(states, wanted, cell), -told.get(cell[1:], 0), *cell[1:]))
    if not cells:
        return Fault(run.num_steps, "", [], right, name)
    step, rank, chunk = cells[0]
    what = _in_words(states[cells[0]], wanted[cells[0]])
    since = f", from step {step} on" if step else ", from the start"
    return Fault(step, f"rank {rank}'s chunk {chunk} {what}{since}", [[r, c, k] for k, r, c in cells], right, name,
                 _line_of(run, right, cells[0]))


def _line_of(run: ChunkRun, right: ChunkRun | None, cell: tuple[int, int, int]) -> CellLine | None:
    """The line that sent the message with which a chunk, (step, rank, chunk), went wrong; None if there is none."""
    step, rank, chunk = cell
    arrived = [t for t in run.transfers if t.dst == rank and step - 1 == (t.leaves if t.arrives is None else t.arrives)]
    wanted = {t.src for t in right.transfers if (t.leaves, t.dst, t.into) == (step - 1, rank, chunk)} if right else {}
    found = [t for t in arrived if t.into == chunk] or [t for t in arrived if t.chunk == chunk or t.src in wanted]
    return found[0].line if found else None


def _too_often(states: np.ndarray, wanted: np.ndarray, cell: tuple[int, int, int]) -> bool:
    return bool((states[cell] > np.maximum(wanted[cell], 1)).any())


def _states(run: ChunkRun) -> np.ndarray:
    """What each chunk holds before the first step and after each, (S+1, R, C, K), NaN where that is unknown."""
    unknown = (np.nan,) * run.world_size
    ranks, chunks = range(run.world_size), range(run.num_chunks)
    return np.array([[[held.get((r, c)) or unknown for c in chunks] for r in ranks] for held in run.states()], float)


def _alike(held: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """Whether the contents are those wanted or their mean, (..., K) against (..., K)."""
    world_size = held.shape[-1]
    return (held == wanted).all(axis=-1) | np.isclose(held * world_size, wanted, atol=1e-3).all(axis=-1)


def _nearest(run: ChunkRun, promise: Promise) -> tuple[str, ChunkRun] | None:
    """The right run that has the most in common with `run`, at least in its first half, and its schedule's name."""
    if run.called or max(run.world_size, run.num_chunks) > LARGEST or np.isnan(_states(run)[0]).any():
        return None
    sent = {(t.leaves, t.src, t.dst, t.chunk) for t in run.transfers}
    best = max(_candidates(run, promise), key=lambda one: _in_common(sent, one[1]), default=None)
    if best is None or _in_common(sent, best[1]) < NEARLY:
        return None
    name, transfers = best
    right = _replayed(run, transfers)
    final, where = _states(right)[-1], promise.where(run.world_size, run.num_chunks)
    return (name, right) if _alike(final, promise.goal(*where.shape))[where].all() else None


def _candidates(run: ChunkRun, promise: Promise) -> Iterator[tuple[str, list[Transfer]]]:
    for name, collective in COLLECTIVES.items():
        if collective.promise != promise.name:
            continue
        for arguments in collective.sizes(run.world_size):
            schedule = collective.schedule(*arguments)
            if schedule.num_chunks == run.num_chunks:
                yield from ((name, _transfers(schedule, by)) for by in range(run.num_chunks))


def _transfers(schedule: Schedule, by: int) -> list[Transfer]:
    """The moves of a schedule as transfers, the numbers of their chunks raised by `by`."""
    def moved(chunk: int) -> int:
        return (chunk + by) % schedule.num_chunks

    return [Transfer(m.src, m.dst, moved(m.chunk), moved(m.chunk if m.into is None else m.into), m.op, m.step, m.step)
            for m in schedule.moves]


def _in_common(sent: set[tuple[int, int, int, int | None]], transfers: Sequence[Transfer]) -> float:
    """The share of messages that both have, by step, ranks and chunk; half as much where the run's chunk is unknown."""
    same = sum(1.0 if (t.leaves, t.src, t.dst, t.chunk) in sent else
               0.5 * ((t.leaves, t.src, t.dst, None) in sent) for t in transfers)
    return same / max(len(transfers), len(sent))


def _replayed(run: ChunkRun, transfers: Sequence[Transfer]) -> ChunkRun:
    """The transfers carried out on the contents that `run` starts with; fills in what was sent and is held after."""
    held: dict[tuple[int, int], Contributions] = dict(run.start)
    num_steps = max(t.leaves for t in transfers) + 1
    for step in range(num_steps):
        before = dict(held)
        for t in (t for t in transfers if t.leaves == step):
            t.sent, old = before.get((t.src, t.chunk or 0)), held.get((t.dst, t.into or 0))
            t.after = t.sent
            if t.op == "reduce" and t.sent and old:
                t.after = tuple(a + b for a, b in zip(t.sent, old))
            held[t.dst, t.into or 0] = t.after
    return ChunkRun(run.world_size, run.num_chunks, num_steps, list(transfers), dict(run.start), sizes=run.sizes)


def _in_words(held: np.ndarray, wanted: np.ndarray) -> str:
    """What is wrong with a chunk's contents, (K,) against (K,), as the end of a sentence about it."""
    if np.isnan(held).any():
        return "holds something unknown"
    if not np.array_equal(held, np.rint(held)):
        return "is not a sum that is right"
    often, lacks = np.flatnonzero(held > np.maximum(wanted, 1)), np.flatnonzero(held < wanted)
    extra = np.flatnonzero((held > wanted) & (held == 1))
    parts = []
    if len(often):
        times = {2: "twice"}.get(int(held[often].max()), f"{held[often].max():g} times")
        parts.append(f"counts {ranks_named(often.tolist())} {times}")
    if len(lacks):
        parts.append(f"lacks {ranks_named(lacks.tolist())}")
    if len(extra):
        parts.append(f"also holds {ranks_named(extra.tolist())}")
    return " and ".join(parts)
