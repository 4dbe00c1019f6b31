"""L0: traces as plain data: what happened, when, on which rank.

The same form whether it was simulated, executed, or recorded from a program: a player, a plot or a check never asks
where a trace came from, except to say so.

    kind        what the event says
    hold        rank has these contributions in its chunk: at the start, after it changed them by itself, or, where op
                names one, after a collective; or, where op names one (see book.blocks), in its block of a matrix
    send        rank sent chunk to peer; contributions: what was in the message
    recv        rank got chunk from peer, and op says what it did with it: "reduce" (added) or "copy" (replaced);
                contributions: what its chunk held afterwards
    collective  rank took part in op ("all_reduce", ...) over the ranks in group; unit names the part of the model that
                it was about, where that is known
    compute     rank worked: op says on what
    memory      from here on rank holds num_bytes of what op names ("parameters", "gradients", "optimizer",
                "activations") for the part of the model that unit names

Compute events are told apart by their fields: the gradient of a followed backward pass has num_bytes and, as op, its
parameter; a pipeline's action has stage, micro_batch and, as op, its kind (see book.schedule.actions); a followed
matrix product has a BlockOp as op (see book.blocks). A pipeline's messages have stage and micro_batch instead of
a chunk, and op is "output" or "gradient".
"""
from __future__ import annotations

import json
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from book.columns import ABSENT, ColumnError, Columns, count, measure, vector, word
from book.factors import BUS_FACTORS
from book.promise import PROMISES
from book.trace_schema import CellLine, checked

CLOCKS = ("modelled", "measured", "logical")
SOURCES = ("simulated", "executed", "recorded", "instrumented")
STATE = ("parameters", "gradients", "optimizer", "activations")  # what a rank holds, by op of a memory event
SCORES = "scores"  # op of a compute event: which scores of attention a rank works on (see book.record.scores)
EXPERT, CHOSEN, WORKED, RETURNED = "expert", "chosen", "worked", "returned"  # of tokens (see book.record.tokens)
KINDS = ("hold", "send", "recv", "collective", "compute", "memory")


class TraceError(ValueError):
    """Something that is not a trace, or a question that this trace has no answer to."""


@dataclass(frozen=True)
class Event:
    """One thing that one rank did; a field that does not apply is None.

    `peer` and `group` (a tuple) are global ranks, times are seconds on the trace's clock, `num_bytes` is what the
    message, the chunk or the rank's buffer weighed, `contributions` has one number per rank: how often its data is in
    the chunk (of a matrix product: how often each partial product, and at last the bias, is in the block). `stage` and
    `micro_batch` are a pipeline's, `step` a schedule's or a level of happens-before. `bucket` says which bucket of
    gradients a compute event fills or a collective carries; `waited`, of a collective in a followed backward pass, how
    many of its rank's gradients were ready when the program had waited for it. `line` is the line of a notebook's cell
    that called a send, where that is known. `parts` are the bytes that an uneven all-to-all has for each rank of its
    group, in the order of `group`.
    """

    rank: int = count()
    kind: str = word()
    op: str | None = word(default=None)
    peer: int | None = count(default=None)
    group: tuple[int, ...] | None = word(default=None)
    chunk: int | None = count(default=None)
    stage: int | None = count(default=None)
    micro_batch: int | None = count(default=None)
    step: int | None = count(default=None)
    num_bytes: float | None = measure(default=None)
    start_s: float | None = measure(default=None)
    end_s: float | None = measure(default=None)
    contributions: tuple[float, ...] | None = vector(default=None)
    bucket: int | None = count(default=None)
    waited: int | None = count(default=None)
    unit: str | None = word(default=None)
    line: CellLine | None = word(default=None)
    parts: tuple[float, ...] | None = word(default=None)

    @property
    def times_s(self) -> tuple[float, float]:
        """When it began and ended; TraceError where one of them is not known."""
        if self.start_s is None or self.end_s is None:
            raise TraceError(f"this {self.kind} of rank {self.rank} has no start or no end")
        return self.start_s, self.end_s

    @property
    def sent_bytes(self) -> float:
        """Bytes that the rank sent in it: a message's, or of a collective the factor's share (see book.factors).

        Of an all-to-all those for other ranks; of a barrier none. Of an operation with a root no event says who that
        is: each rank counts as the busiest. Raises TraceError for a collective without a factor.
        """
        if self.kind == "send":
            return self.num_bytes or 0.0
        if self.kind != "collective" or self.op == "barrier":
            return 0.0
        if self.op is None or self.op not in BUS_FACTORS:
            raise TraceError(f"how much a rank sends in {self.op} is not known: of collectives "
                             f"{', '.join(BUS_FACTORS)} count")
        if self.op == "all_to_all":
            return sum(self.parts_by_rank.values())
        return BUS_FACTORS[self.op](len(self.group or (self.rank,))) * (self.num_bytes or 0.0)

    @property
    def parts_by_rank(self) -> dict[int, float]:
        """What an all-to-all sends to each other rank of its group: equal parts, unless their sizes are known."""
        group = self.group or (self.rank,)
        even = [(self.num_bytes or 0.0) / len(group)] * len(group)
        return {rank: part for rank, part in zip(group, self.parts or even) if rank != self.rank}


class Trace:
    """Events of `world_size` ranks on one clock, kept as NumPy columns; `.events` is a sequence of `Event`.

    `clock` is "modelled", "measured" or "logical" (no times, only order); `source` is "simulated", "executed",
    "recorded" or "instrumented". `name`, `backend` and `promise` (what the run should end in, see book.promise) say
    what ran, where that is known. `clock_error_s` is by how much two ranks' times may be wrong against each other, if
    their clocks had to be aligned. `hangs` says of a run that hung who waits for whom. Raises TraceError for anything
    that a trace can't be.
    """

    def __init__(self, events: Iterable[Event], world_size: int, clock: str, source: str, *,
                 name: str | None = None, backend: str | None = None, promise: str | None = None,
                 clock_error_s: float | None = None, hangs: str | None = None):
        _check_choice("clock", clock, CLOCKS)
        _check_choice("source", source, SOURCES)
        _check_choice("promise", promise, (None, *PROMISES))
        if isinstance(world_size, bool) or not isinstance(world_size, (int, np.integer)) or world_size < 1:
            raise TraceError(f"world_size must be a whole number of at least 1, not {world_size!r}")
        self.world_size, self.clock, self.source = int(world_size), clock, source
        self.name, self.backend, self.promise, self.clock_error_s = name, backend, promise, clock_error_s
        self.hangs = hangs
        try:
            self.events: Columns = Columns.from_rows(Event, events)
        except ColumnError as error:
            raise TraceError(str(error)) from error
        self._check_events()

    def __repr__(self) -> str:
        what = f"{self.name}: " if self.name else ""
        return f"<Trace {what}{self.source}, {self.clock} clock, {self.world_size} ranks, {len(self.events)} events>"

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Trace):
            return NotImplemented
        return self._head() == other._head() and self.events == other.events

    __hash__ = None  # type: ignore[assignment]

    @property
    def num_chunks(self) -> int:
        """How many chunks a buffer has, read off the events (0 when none names a chunk)."""
        return int(self.events.array("chunk").max()) + 1 if self.events.has("chunk") and len(self.events) else 0

    @property
    def num_steps(self) -> int:
        """How many steps the trace has (0 when no event belongs to a step)."""
        return int(self.events.array("step").max()) + 1 if self.events.has("step") and len(self.events) else 0

    @property
    def duration_s(self) -> float | None:
        """Seconds from the first start to the last end; None where nothing has an end, as on a logical clock."""
        ends = [self.events.array(name) for name in ("start_s", "end_s") if self.events.has(name)]
        if len(ends) < 2 or np.isnan(ends[1]).all():
            return None
        return float(np.nanmax(ends[1]) - np.nanmin(ends[0]))

    def of_kind(self, kind: str) -> Columns:
        """The events of one kind, in the trace's order."""
        return self.events.take(self.events.mask("kind", kind))

    def of_rank(self, rank: int) -> Columns:
        """The events of one rank, in the trace's order."""
        return self.events.take(self.events.array("rank") == rank)

    def sent_bytes(self) -> np.ndarray:
        """Bytes that each rank sent in messages and in the library's collectives, shape (world_size,).

        A trace does not show how the library moves data: a collective counts by the factor of an algorithm that is as
        frugal as can be, 2(p-1)/p of the buffer for an all-reduce of p ranks (see `Event.sent_bytes`). What was seen
        to be sent, alone, is `message_bytes`. Raises TraceError for a collective without a factor.
        """
        collectives = self.of_kind("collective")
        sent = np.bincount([event.rank for event in collectives], minlength=self.world_size,
                           weights=[event.sent_bytes for event in collectives]) if len(collectives) else 0
        return self.message_bytes() + sent

    def message_bytes(self) -> np.ndarray:
        """Bytes that each rank sent in point-to-point messages, shape (world_size,)."""
        sends = self.of_kind("send")
        if not len(sends) or not sends.has("num_bytes"):
            return np.zeros(self.world_size)
        return np.bincount(sends.array("rank"), weights=sends.array("num_bytes"), minlength=self.world_size)

    def held(self) -> dict[tuple[int, int], tuple[float, ...] | None]:
        """What each (rank, chunk) holds at the end, as far as the events tell."""
        last = {}
        for event in self.events:
            if event.kind in ("hold", "recv") and event.chunk is not None:
                last[event.rank, event.chunk] = event.contributions
        return last

    def logical(self) -> Trace:
        """The same events without times, in an order that the same program always gives: rank by rank, step by step.

        Within one rank's step, what it held comes first, then sends, then receives, by peer and chunk. What a trace's
        steps are is up to its source: a schedule's own, or, for a recording, levels of happens-before.
        """
        rows = np.lexsort([self._key(name) for name in ("chunk", "peer", "kind", "step", "rank")])
        ordered = self.events.take(rows).replace(start_s=None, end_s=None)
        return Trace(ordered, self.world_size, "logical", self.source, name=self.name, backend=self.backend,
                     promise=self.promise, hangs=self.hangs)

    def renumbered(self, numbers: Sequence[int]) -> Trace:
        """The same run, in which rank r is called `numbers[r]`; contributions, one for each rank, go with it.

        It promises nothing: another rank may be the root. Raises TraceError unless these are the numbers of all ranks
        in some order.
        """
        if sorted(numbers) != list(range(self.world_size)):
            raise TraceError(f"{list(numbers)} must be the ranks 0 to {self.world_size - 1} in some order")
        old = np.argsort(numbers)
        events = [replace(event, rank=int(numbers[event.rank]), parts=_reordered(event, numbers),
                          peer=None if event.peer is None else int(numbers[event.peer]),
                          group=event.group and tuple(sorted(int(numbers[rank]) for rank in event.group)),
                          contributions=event.contributions and tuple(event.contributions[k] for k in old))
                  for event in self.events]
        return Trace(events, **{**self._head(), "promise": None, "hangs": None})

    def to_json(self) -> str:
        """The trace as JSON text, a list per field; fields that are None everywhere are left out."""
        columns = {}
        for f in fields(Event):
            if self.events.has(f.name):
                columns[f.name] = [getattr(event, f.name) for event in self.events]
        return json.dumps({"format": "lockstep trace 1", **self._head(), "events": columns}, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> Trace:
        """The trace that `to_json` wrote; raises TraceError when the text is something else."""
        try:
            data = json.loads(text)
            if data.pop("format") != "lockstep trace 1":
                raise KeyError("format")
            columns: dict[str, list[Any]] = data.pop("events")
            rows = [dict(zip(columns, values)) for values in zip(*columns.values(), strict=True)]
            checked(data, rows)
            return cls([_event(row) for row in rows], **data)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise TraceError(f"this is not a trace's JSON (write one with to_json): {error}") from error

    def _head(self) -> dict[str, Any]:
        head = {"world_size": self.world_size, "clock": self.clock, "source": self.source, "name": self.name,
                "backend": self.backend, "promise": self.promise}
        further = {"clock_error_s": self.clock_error_s, "hangs": self.hangs}
        return head | {name: value for name, value in further.items() if value is not None}

    def _check_events(self) -> None:
        unknown = set(self.events.vocabularies.get("kind", ())) - set(KINDS)
        if unknown:
            raise TraceError(f"kind must be one of {', '.join(KINDS)}, not {sorted(map(str, unknown))[0]!r}")
        for name, least in (("rank", 0), ("peer", ABSENT)):
            column = self.events.array(name) if self.events.has(name) else np.zeros(0)
            bad = np.flatnonzero((column < least) | (column >= self.world_size))
            if len(bad):
                raise TraceError(f"event {bad[0]} has {name} {column[bad[0]]}: ranks are 0 to {self.world_size - 1}")

    def _key(self, name: str) -> np.ndarray:
        if not self.events.has(name):
            return np.full(len(self.events), ABSENT)
        if name != "kind":
            return self.events.array(name)
        places = np.array([KINDS.index(k) if k in KINDS else len(KINDS) for k in self.events.vocabularies["kind"]])
        return places[self.events.array("kind")]


def _reordered(event: Event, numbers: Sequence[int]) -> tuple[float, ...] | None:
    """An all-to-all's parts, in the order of its group once rank r is called `numbers[r]`."""
    if event.parts is None or event.group is None:
        return event.parts
    return tuple(part for _, part in sorted(zip((int(numbers[rank]) for rank in event.group), event.parts)))


def parting(actual: Sequence[Any] | np.ndarray, expected: Sequence[Any] | np.ndarray,
            alike: Callable[[Any, Any], Any] = operator.eq, for_good: bool = False) -> int | None:
    """The first place at which two runs part, None if they never do; `for_good`, the one since which they stay apart.

    A run is what a rank did, or what a place held, in order; one that ends before the other parts from it there.
    """
    length = max(len(actual), len(expected))

    def together(place: int) -> bool:
        return place < min(len(actual), len(expected)) and bool(alike(actual[place], expected[place]))

    if for_good:
        since = next((place + 1 for place in reversed(range(length)) if together(place)), 0)
        return since if since < length else None
    return next((place for place in range(length) if not together(place)), None)


def _event(row: Mapping[str, Any]) -> Event:
    values: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in row.items()}
    if row.get("line") is not None:
        values["line"] = CellLine.read(row["line"])
    return Event(**values)


def _check_choice(name: str, value: str | None, choices: tuple[str | None, ...]) -> None:
    if value not in choices:
        raise TraceError(f"{name} must be one of {', '.join(map(str, choices))}, not {value!r}")
