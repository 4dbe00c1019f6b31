"""L3: a followed training step as logical operations: what all ranks gather, compute, scatter and free, and then hold.

book.record.follow_units writes the trace that this reads. All ranks do the same in the same order, so one program
stands for all of them; measured times only order each rank's events.
"""
from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from book.cost import sent_bytes
from book.trace import Event, Trace

GATHERS, REDUCES = ("all_gather",), ("reduce_scatter", "all_reduce")
MOST_RANKS, MOST_UNITS, MOST_OPERATIONS = 8, 24, 160
HINT = "record one with book.record.follow_units: launch(train, 2, record=True).trace"

Piece = tuple[str, str]  # what of book.trace.STATE, of which unit


@dataclass
class MemoryMoment:
    """What all ranks did: a collective, "forward", "backward", "update", "free" or "drop", and what each then holds.

    `changes` are bytes by piece in their order, `num_sent` the bytes that each rank sent.
    """

    op: str
    unit: str
    num_sent: float = 0.0
    changes: list[tuple[Piece, float]] = field(default_factory=list)


@dataclass
class Held:
    """A training step: the bytes of each unit's whole parameters, what is held at first, the operations."""

    world_size: int
    units: dict[str, float]
    start: dict[Piece, float]
    operations: list[MemoryMoment]
    frees: bool

    @property
    def zero_stage(self) -> int | None:
        """The ZeRO stage that this looks like; None if nothing is reduced."""
        ops = [operation.op for operation in self.operations]
        if self.frees:
            return 3
        if "reduce_scatter" not in ops:
            return 0 if "all_reduce" in ops else None
        last_backward = max((k for k, op in enumerate(ops) if op == "backward"), default=-1)
        return 1 if ops.index("reduce_scatter") > last_backward else 2

    @property
    def num_steps(self) -> int:
        """How often the optimizer updated, at least 1."""
        return max(1, sum(operation.op == "update" for operation in self.operations))

    def totals(self) -> Iterator[float]:
        """What each rank holds at first, and after each change."""
        held = dict(self.start)
        yield sum(held.values())
        for operation in self.operations:
            for piece, num_bytes in operation.changes:
                held[piece] = num_bytes
                yield sum(held.values())


def read_held(trace: Trace) -> Held:
    """The logical operations of a followed step; raises ValueError for a trace without one, and if ranks differ."""
    if trace.world_size > MOST_RANKS:
        raise ValueError(f"memory is shown for up to {MOST_RANKS} ranks, and this trace has {trace.world_size}")
    programs = [sorted(trace.of_rank(rank), key=lambda event: event.start_s) for rank in range(trace.world_size)]
    held = [_read(program, trace.world_size) for program in programs]
    if not held[0].units:
        raise ValueError(f"this trace does not say what ranks hold: {HINT}")
    for rank, other in enumerate(held[1:], start=1):
        if other != held[0]:
            raise ValueError(f"ranks 0 and {rank} do not gather, compute and hold the same in the same order, and "
                             "memory is shown for ranks that do")
    if len(held[0].units) > MOST_UNITS or len(held[0].operations) > MOST_OPERATIONS:
        raise ValueError(f"{len(held[0].units)} units and {len(held[0].operations)} actions are more than can be "
                         f"shown ({MOST_UNITS} and {MOST_OPERATIONS}): record one step of a smaller model")
    return held[0]


def _read(events: Sequence[Event], world_size: int) -> Held:
    first: dict[Piece, float] = {}
    frees = False
    for event in events:
        if event.kind == "memory":
            piece, num_bytes = _held(event)
            frees |= event.op == "parameters" and first.get(piece, num_bytes) < num_bytes
            first.setdefault(piece, num_bytes)
    factor, moved = world_size if frees else 1, _moved(events)
    units = {unit: moved.get(unit, num_bytes * factor) for (what, unit), num_bytes in first.items()
             if what == "parameters"}
    reader = _Operations(units)
    for event, later in zip(events, _followers(events)):
        reader.read(event, later)
    return Held(world_size, units, reader.start, reader.operations, frees)


def _held(event: Event) -> tuple[Piece, float]:
    """The piece that a memory event is about, and its bytes."""
    return (event.op or "", event.unit or ""), event.num_bytes or 0.0


def _moved(events: Sequence[Event]) -> dict[str, float]:
    """The bytes of each unit that collectives name: the most that one of them, or several in a row, moved."""
    moved: dict[str, float] = {}
    last: Piece | None = None
    total = 0.0
    for event in events:
        now, num_bytes = _held(event) if event.kind == "collective" and event.unit is not None else (None, 0.0)
        if now is not None:
            total = num_bytes + (total if now == last else 0.0)
            moved[now[1]] = max(moved.get(now[1], 0.0), total)
        last = now
    return moved


def _followers(events: Sequence[Event]) -> list[Event | None]:
    """The memory event, if any, that comes right after each event."""
    return [after if after is not None and after.kind == "memory" else None for after in [*events[1:], None]]


class _Operations:
    """One rank's events as operations.

    A collective that names no unit gets the unit whose bytes change, or the next one of its size. Several in a row for
    one unit are one operation.
    """

    def __init__(self, units: dict[str, float]):
        self._units = units
        self._held: dict[Piece, float] = {}
        self._done: set[Piece] = set()
        self.start: dict[Piece, float] = {}
        self.operations: list[MemoryMoment] = []

    def read(self, event: Event, later: Event | None) -> None:
        if event.kind == "memory":
            self._memory(event)
        elif event.kind == "compute" and event.unit is not None:
            self._done.clear()
            self.operations.append(MemoryMoment(event.op or "", event.unit))
        elif event.kind == "collective" and event.op in GATHERS + REDUCES:
            unit = event.unit or self._unit_of(event, later)
            if unit is not None:  # others, such as the mean of a loss, are not state
                self._done.add((event.op or "", unit))
                self._collective(event, unit)

    def _collective(self, event: Event, unit: str) -> None:
        last = self.operations[-1] if self.operations else None
        if event.unit and last and (last.op, last.unit) == (event.op, unit) and not last.changes:
            last.num_sent += sent_bytes(event)
        else:
            self.operations.append(MemoryMoment(event.op or "", unit, sent_bytes(event)))

    def _unit_of(self, event: Event, later: Event | None) -> str | None:
        what = "parameters" if event.op in GATHERS else "gradients"
        fits = [unit for unit, num_bytes in self._units.items() if num_bytes == event.num_bytes]
        if later is not None and later.op == what and later.unit in fits:
            return later.unit
        return next((unit for unit in fits if (event.op or "", unit) not in self._done), None)

    def _memory(self, event: Event) -> None:
        piece, num_bytes = _held(event)
        before = self._held.get(piece, 0.0)
        self._held[piece] = num_bytes
        if not self.operations:
            self.start[piece] = num_bytes
            return
        what, unit = piece
        if what == "parameters" and num_bytes < before:
            self.operations.append(MemoryMoment("free", unit))
        elif what == "gradients" and not num_bytes and self.operations[-1].op not in ("drop", *REDUCES):
            self.operations.append(MemoryMoment("drop", "all"))
        self.operations[-1].changes.append((piece, num_bytes))
