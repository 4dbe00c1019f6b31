"""L3: a followed training step as logical actions: what all ranks gather, compute, scatter and free, and then hold.

book.record.follow_units writes the trace that this reads. All ranks do the same in the same order, so one program
stands for all of them; measured times only order each rank's events.
"""
from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from book.cost import sent_bytes
from book.trace import Event, Trace

GATHERS, REDUCES = ("all_gather",), ("reduce_scatter", "all_reduce")
MOST_RANKS, MOST_UNITS, MOST_ACTIONS = 8, 24, 160
HINT = "record one with book.record.follow_units: launch(train, 2, record=True).trace"

Place = tuple[str, str]  # what of book.trace.STATE, of which unit


@dataclass
class Action:
    """What all ranks did: a collective, "forward", "backward", "update", "free" or "drop", and what each then holds.

    `changes` are bytes by place in their order, `num_sent` the bytes that each rank sent.
    """

    op: str
    unit: str
    num_sent: float = 0.0
    changes: list[tuple[Place, float]] = field(default_factory=list)


@dataclass
class Held:
    """A training step: the bytes of each unit's whole parameters, what is held at first, the actions."""

    world_size: int
    units: dict[str, float]
    start: dict[Place, float]
    actions: list[Action]
    frees: bool

    @property
    def zero_stage(self) -> int | None:
        """The ZeRO stage that this looks like; None if nothing is reduced."""
        ops = [action.op for action in self.actions]
        if self.frees:
            return 3
        if "reduce_scatter" not in ops:
            return 0 if "all_reduce" in ops else None
        last_backward = max((k for k, op in enumerate(ops) if op == "backward"), default=-1)
        return 1 if ops.index("reduce_scatter") > last_backward else 2

    @property
    def num_steps(self) -> int:
        """How often the optimizer updated, at least 1."""
        return max(1, sum(action.op == "update" for action in self.actions))

    def totals(self) -> Iterator[float]:
        """What each rank holds at first, and after each change."""
        held = dict(self.start)
        yield sum(held.values())
        for action in self.actions:
            for place, num_bytes in action.changes:
                held[place] = num_bytes
                yield sum(held.values())


def read_held(trace: Trace) -> Held:
    """The logical actions of a followed step; raises ValueError for a trace without one, and if ranks differ."""
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
    if len(held[0].units) > MOST_UNITS or len(held[0].actions) > MOST_ACTIONS:
        raise ValueError(f"{len(held[0].units)} units and {len(held[0].actions)} actions are more than can be shown "
                         f"({MOST_UNITS} and {MOST_ACTIONS}): record one step of a smaller model")
    return held[0]


def _read(events: Sequence[Event], world_size: int) -> Held:
    first: dict[Place, float] = {}
    frees = False
    for event in events:
        if event.kind == "memory":
            place, num_bytes = _held(event)
            frees |= event.op == "parameters" and first.get(place, num_bytes) < num_bytes
            first.setdefault(place, num_bytes)
    factor, moved = world_size if frees else 1, _moved(events)
    units = {unit: moved.get(unit, num_bytes * factor) for (what, unit), num_bytes in first.items()
             if what == "parameters"}
    reader = _Reader(units)
    for event, later in zip(events, _followers(events)):
        reader.read(event, later)
    return Held(world_size, units, reader.start, reader.actions, frees)


def _held(event: Event) -> tuple[Place, float]:
    """The place that a memory event is about, and its bytes."""
    return (event.op or "", event.unit or ""), event.num_bytes or 0.0


def _moved(events: Sequence[Event]) -> dict[str, float]:
    """The bytes of each unit that collectives name: the most that one of them, or several in a row, moved."""
    moved: dict[str, float] = {}
    last: Place | None = None
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


class _Reader:
    """One rank's events as actions.

    A collective that names no unit gets the unit whose bytes change, or the next one of its size. Several in a row for
    one unit are one action.
    """

    def __init__(self, units: dict[str, float]):
        self._units = units
        self._held: dict[Place, float] = {}
        self._done: set[Place] = set()
        self.start: dict[Place, float] = {}
        self.actions: list[Action] = []

    def read(self, event: Event, later: Event | None) -> None:
        if event.kind == "memory":
            self._memory(event)
        elif event.kind == "compute" and event.unit is not None:
            self._done.clear()
            self.actions.append(Action(event.op or "", event.unit))
        elif event.kind == "collective" and event.op in GATHERS + REDUCES:
            unit = event.unit or self._unit_of(event, later)
            if unit is not None:  # others, such as the mean of a loss, are not state
                self._done.add((event.op or "", unit))
                self._collective(event, unit)

    def _collective(self, event: Event, unit: str) -> None:
        last = self.actions[-1] if self.actions else None
        if event.unit and last and (last.op, last.unit) == (event.op, unit) and not last.changes:
            last.num_sent += sent_bytes(event)
        else:
            self.actions.append(Action(event.op or "", unit, sent_bytes(event)))

    def _unit_of(self, event: Event, later: Event | None) -> str | None:
        what = "parameters" if event.op in GATHERS else "gradients"
        fits = [unit for unit, num_bytes in self._units.items() if num_bytes == event.num_bytes]
        if later is not None and later.op == what and later.unit in fits:
            return later.unit
        return next((unit for unit in fits if (event.op or "", unit) not in self._done), None)

    def _memory(self, event: Event) -> None:
        place, num_bytes = _held(event)
        before = self._held.get(place, 0.0)
        self._held[place] = num_bytes
        if not self.actions:
            self.start[place] = num_bytes
            return
        what, unit = place
        if what == "parameters" and num_bytes < before:
            self.actions.append(Action("free", unit))
        elif what == "gradients" and not num_bytes and self.actions[-1].op not in ("drop", *REDUCES):
            self.actions.append(Action("drop", "all"))
        self.actions[-1].changes.append((place, num_bytes))
