"""L2: replay a followed backward pass: the recorded order, with durations from a model.

Times measured on ranks that share a few cores say nothing about ranks with a GPU each: computation and communication
slow each other down. The order is still valid: which gradients were ready when a bucket was sent, and what the program
waited for. A replay keeps the order and takes the durations from `Replay`.
"""
from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from book.cost import Link, ring_all_reduce_s
from book.trace import Event, Trace

Group = tuple[int, ...]
Interval = tuple[float, float]


@dataclass(frozen=True)
class Replay:
    """How long a backward pass takes: call it with a recorded trace to get the same events on a modelled clock.

    A gradient starts after the previous one and takes `backward_s_per_byte` per byte (a matrix costs the same number of
    operations per element, whatever its shape), times the rank's factor in `slowdown`. An all-reduce starts when every
    rank of its group has issued it and the group's previous one is done, as on one communication stream, and takes the
    time of a ring on `link` (cost.ring_all_reduce_s). A gradient waits for the all-reduces that the program had waited
    for (an event's `waited`; a wait for a future is not seen), and a new pass over the same parameters waits for all
    earlier ones. Not modelled: the forward pass, activations, copies into and out of buckets, the optimizer, and groups
    that share a link.
    """

    backward_s_per_byte: float
    link: Link
    slowdown: Mapping[int, float] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        if not self.backward_s_per_byte >= 0:
            raise ValueError(f"backward_s_per_byte can't be negative: {self.backward_s_per_byte}")
        for rank, factor in self.slowdown.items():
            if not factor > 0:
                raise ValueError(f"slowdown must be a positive factor on a rank's time, not {factor} for rank {rank}")

    def __call__(self, trace: Trace) -> Trace:
        """The followed gradients and their all-reduces, in the order of `trace`, with modelled times from 0 s.

        An all-reduce without a known bucket is kept if gradients without a bucket were ready before it. Events have
        neither step nor `waited`: programs that send the same buckets at the same places have equal replays. Raises
        ValueError for a trace that was not measured or has no followed backward pass, and for all-reduces that differ
        between the ranks of a group.
        """
        if trace.clock != "measured":
            raise ValueError(f"this trace has a {trace.clock} clock: replay the trace that was recorded, run.trace")
        programs = followed(trace)
        _check_all_reduces(programs)
        events = _Ranks(self, programs).run()
        return Trace(events, trace.world_size, "modelled", trace.source, name=trace.name, backend=trace.backend)

    def gradient_s(self, event: Event) -> float:
        """Seconds that a gradient takes on its rank."""
        return self.backward_s_per_byte * (event.num_bytes or 0.0) * self.slowdown.get(event.rank, 1.0)

    def all_reduce_s(self, event: Event) -> float:
        """Seconds that an all-reduce takes once it has started."""
        return ring_all_reduce_s(len(event.group or ()), event.num_bytes or 0.0, self.link)


@dataclass(frozen=True)
class Overlap:
    """How much of the communication was hidden behind the backward pass, in seconds, on the slowest rank.

    `backward_s` is how long gradients were computed, `communication_s` how long some all-reduce ran: `hidden_s` of it
    while gradients were computed, `exposed_s` while none were. `step_s` is from the first start to the last end over
    all ranks.
    """

    backward_s: float
    communication_s: float
    hidden_s: float
    exposed_s: float
    step_s: float


def overlap(trace: Trace) -> Overlap:
    """The overlap in a replayed trace, or in a recorded one whose measured times are meaningful.

    The slowest rank is the one that ends last; ties go to the one that computes longest. Raises ValueError for a trace
    without a followed backward pass, or with one that did not end.
    """
    programs = followed(trace)
    events = [event for program in programs for event in program]
    if any(event.end_s is None for event in events):
        raise ValueError("an all-reduce of this backward pass did not end, so it has no overlap")
    slowest = max(filter(None, programs), key=lambda program: (max(event.times_s[1] for event in program),
                                                               _length(_intervals(program, "compute"))))
    computing, communicating = _intervals(slowest, "compute"), _intervals(slowest, "collective")
    communication_s, hidden_s = _length(communicating), _length(_both(computing, communicating))
    step_s = max(event.times_s[1] for event in events) - min(event.times_s[0] for event in events)
    return Overlap(_length(computing), communication_s, hidden_s, communication_s - hidden_s, step_s)


def followed(trace: Trace) -> list[list[Event]]:
    """For each rank its followed gradients and the all-reduces that may carry them, in program order.

    Gradients are ordered by when they were ready, all-reduces by when they were issued. Raises ValueError if no
    gradient was followed.
    """
    programs: list[list[Event]] = [[] for _ in range(trace.world_size)]
    placed = [(moment, event) for event in trace.events if (moment := _moment(event)) is not None]
    for _, event in sorted(placed, key=lambda item: item[0]):
        programs[event.rank].append(event)
    programs = [list(_of_backward(program)) for program in programs]
    if not any(event.kind == "compute" for program in programs for event in program):
        raise ValueError("this trace follows no backward pass: call backward inside `with follow_backward(model):` "
                         "and launch with record=True")
    everyone = tuple(range(trace.world_size))
    return [[replace(event, group=event.group or everyone) if event.kind == "collective" else event
             for event in program] for program in programs]


def _moment(event: Event) -> tuple[float, bool] | None:
    """When the program reached this event; None if it is neither a gradient nor a collective, or has no time."""
    if event.kind == "compute" and event.num_bytes is not None and event.end_s is not None:
        return event.end_s, False
    if event.kind == "collective" and event.start_s is not None:
        return event.start_s, True
    return None


def _of_backward(program: Sequence[Event]) -> Iterator[Event]:
    """One rank's gradients, and its all-reduces that have a bucket or follow a gradient of this pass that has none."""
    unknown = False
    seen: set[str | None] = set()
    for event in program:
        if event.kind == "compute":
            if event.op in seen:  # a new pass: the previous one has no bearing on it
                unknown = False
                seen.clear()
            seen.add(event.op)
            unknown = unknown or event.bucket is None
            yield event
        elif event.op == "all_reduce":
            if event.bucket is not None or unknown:
                yield event
        elif event.bucket is not None:
            raise ValueError(f"rank {event.rank} sends bucket {event.bucket} by {event.op}: "
                             "only all-reduces can be replayed")


def _check_all_reduces(programs: Sequence[Sequence[Event]]) -> None:
    """Raise ValueError unless the ranks of each group issue the same all-reduces."""
    calls: dict[Group, dict[int, list[Event]]] = defaultdict(lambda: defaultdict(list))
    for program in programs:
        for event in program:
            if event.kind == "collective":
                calls[event.group or ()][event.rank].append(event)
    for group, by_rank in calls.items():
        for rank in group:
            ours, theirs = by_rank[group[0]], by_rank[rank]
            if len(ours) != len(theirs):
                raise ValueError(f"in its backward pass rank {group[0]} issued {len(ours)} all-reduces and rank {rank} "
                                 f"{len(theirs)}: every rank of a group must follow the same passes")
            for number, (own, other) in enumerate(zip(ours, theirs)):
                if own.num_bytes != other.num_bytes:
                    raise ValueError(f"all-reduce {number} has {own.num_bytes} bytes on rank {group[0]} and "
                                     f"{other.num_bytes} on rank {rank}: the ranks of a group must send the same")


@dataclass
class _AllReduce:
    """One all-reduce of a group: when each rank issued it, and, once all have, when it runs."""

    issued_s: dict[int, float] = field(default_factory=dict)
    start_s: float | None = None
    end_s: float | None = None


class _Ranks:
    """Runs the ranks' programs side by side, each until it waits for an all-reduce that others must issue."""

    def __init__(self, replay: Replay, programs: Sequence[Sequence[Event]]):
        self._replay, self._programs = replay, programs
        self._at, self._clock_s = [0] * len(programs), [0.0] * len(programs)
        self._channels: dict[Group, list[_AllReduce]] = defaultdict(list)
        self._issued: list[list[tuple[Event, _AllReduce]]] = [[] for _ in programs]
        self._seen: list[set[str | None]] = [set() for _ in programs]  # gradients of the pass under way
        self._num_ready = [0] * len(programs)
        self._gradients: list[Event] = []

    def run(self) -> list[Event]:
        """All events with their times, sorted by start, end and rank."""
        while any(self._at[rank] < len(program) for rank, program in enumerate(self._programs)):
            if not any([self._advance(rank) for rank in range(len(self._programs))]):
                raise ValueError("in this order each rank waits for an all-reduce that another has yet to issue")
        sent = [replace(event, step=None, waited=None, start_s=run.start_s, end_s=run.end_s)
                for own in self._issued for event, run in own]
        return sorted(self._gradients + sent, key=lambda event: (event.start_s, event.end_s, event.rank))

    def _advance(self, rank: int) -> bool:
        start, program = self._at[rank], self._programs[rank]
        while self._at[rank] < len(program):
            event = program[self._at[rank]]
            if event.kind == "collective":
                self._issue(event)
            elif not self._compute(event):
                break
            self._at[rank] += 1
        return self._at[rank] > start

    def _compute(self, event: Event) -> bool:
        """Place a gradient after the previous one and what the program waited for; False if that is still unknown."""
        rank = event.rank
        again = event.op in self._seen[rank]
        awaited = [run for sent, run in self._issued[rank] if again or self._has_waited(sent)]
        ends_s = [run.end_s for run in awaited if run.end_s is not None]
        if len(ends_s) < len(awaited):
            return False
        if again:
            self._seen[rank].clear()
        self._seen[rank].add(event.op)
        start_s = max([self._clock_s[rank], *ends_s])
        self._clock_s[rank] = start_s + self._replay.gradient_s(event)
        self._num_ready[rank] += 1
        self._gradients.append(replace(event, step=None, start_s=start_s, end_s=self._clock_s[rank]))
        return True

    def _has_waited(self, sent: Event) -> bool:
        """Whether the rank's program had waited for an all-reduce before its next gradient was ready."""
        return sent.waited is not None and sent.waited <= self._num_ready[sent.rank]

    def _issue(self, event: Event) -> None:
        group, rank = event.group or (), event.rank
        channel = self._channels[group]
        number = sum(sent.group == event.group for sent, _ in self._issued[rank])
        if number == len(channel):
            channel.append(_AllReduce())
        run = channel[number]
        run.issued_s[rank] = self._clock_s[rank]
        self._issued[rank].append((event, run))
        if len(run.issued_s) == len(group):
            before_s = (channel[number - 1].end_s if number else None) or 0.0
            run.start_s = max([before_s, *run.issued_s.values()])
            run.end_s = run.start_s + self._replay.all_reduce_s(event)


def _intervals(program: Sequence[Event], kind: str) -> list[Interval]:
    """When events of a kind ran, as disjoint intervals in order."""
    merged: list[Interval] = []
    for start_s, end_s in sorted(event.times_s for event in program if event.kind == kind):
        if merged and start_s <= merged[-1][1]:
            start_s, end_s = merged[-1][0], max(merged.pop()[1], end_s)
        merged.append((start_s, end_s))
    return merged


def _both(a: Sequence[Interval], b: Sequence[Interval]) -> list[Interval]:
    return [(max(x[0], y[0]), min(x[1], y[1])) for x in a for y in b if max(x[0], y[0]) < min(x[1], y[1])]


def _length(intervals: Sequence[Interval]) -> float:
    return sum(end_s - start_s for start_s, end_s in intervals)
