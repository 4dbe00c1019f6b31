"""L2: what one rank's recorder keeps, as plain data: its operations, its log, its chunks and its gradients."""
from __future__ import annotations

from dataclasses import dataclass, field

from book.trace import Event
from book.trace_schema import CellLine


@dataclass(frozen=True)
class MessageChunk:
    """One chunk of a message: which chunk, "reduce" or "copy" (on the receiver), and its contributions.

    `candidates` are the sender's chunks that held exactly what was sent; if there are several, only the receiver can
    tell which it was.
    """

    chunk: int | None
    op: str | None
    num_bytes: float
    contributions: tuple[float, ...] | None
    candidates: tuple[int, ...] = ()


@dataclass(frozen=True)
class Hold:
    """What a chunk held after a change: by its rank, just before log entry `position`, or by collective `operation`."""

    chunk: int
    contributions: tuple[float, ...] | None
    position: int
    time_ns: int
    operation: int | None = None


@dataclass
class Operation:
    """One call of one rank: `kind` is "send", "recv" or "collective"; `peer` and `ranks`, its group's, are global.

    A `withdrawn` call was refused by the backend, so it moved nothing and matches nothing. `bucket` is the bucket of
    gradients that it carries, if followed and known, `unit` the part of the model that it belongs to, and `line` the
    line of a notebook's cell that called it, if it is a send and that is known. `parts` are the bytes for each of
    `ranks`, of an all-to-all that names their sizes.
    """

    kind: str
    op: str | None
    group: str
    ranks: tuple[int, ...]
    peer: int | None
    tag: int
    num_bytes: float
    start_ns: int
    end_ns: int | None = None
    pieces: tuple[MessageChunk, ...] = ()
    withdrawn: bool = False
    bucket: int | None = None
    unit: str | None = None
    line: CellLine | None = None
    parts: tuple[float, ...] | None = None


@dataclass
class Gradient:
    """The gradient of parameter `name` in a followed backward pass, ready at `end_ns` and before log entry `position`.

    `start_ns` is when the previous one was ready, or backward began. `bucket` is the bucket it was all-reduced in.
    """

    name: str
    num_bytes: int
    position: int
    start_ns: int
    end_ns: int
    bucket: int | None = None


@dataclass(frozen=True)
class Origin:
    """Where emitted events come from; `name` and `promise` are those of an executed schedule."""

    source: str
    name: str | None = None
    promise: str | None = None


@dataclass
class Recording:
    """All that one rank's recorder saw: `log` is its program order, ("issue" | "wait", position in `operations`).

    `emitted` are events that the program created itself, with times in seconds of CLOCK_MONOTONIC, from `origins`.
    """

    operations: list[Operation] = field(default_factory=list)
    log: list[tuple[str, int]] = field(default_factory=list)
    holds: list[Hold] = field(default_factory=list)
    gradients: list[Gradient] = field(default_factory=list)
    emitted: list[Event] = field(default_factory=list)
    origins: list[Origin] = field(default_factory=list)
