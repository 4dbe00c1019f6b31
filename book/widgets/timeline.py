"""L3: the bucket timeline: a followed backward pass, replayed on a modelled clock, on a page and in a notebook.

`names` and `sizes` hold each gradient's parameter and bytes once for all runs. A run has, in addition to what
scene.js says about all runs,

    duration_s   how long TICKS ticks, the unit of all its times, last
    buckets      the numbers of its buckets, in the order in which they get their first gradient; -1: no known bucket
    ranks        for each rank its `gradients` in the order they were ready, [place in `names`, place in `buckets`,
                 from, to], and where its all-reduces run while no gradient is computed: `exposed`, [from, to]
    flights      all-reduces: `bucket` (its place), `start`, `end`, `bytes`, `ranks`
    overlap      what book.replay.overlap says, in seconds; `even`: all ranks do the same
"""
from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from html import escape
from typing import TYPE_CHECKING, Any

from book.replay import Overlap, followed, overlap
from book.trace import Event, Trace
from book.widgets.page import Data, Recorded, arranged, heading, names_of, table
from book.widgets.show import show
from book.widgets.terms import origin
from book.words import in_seconds

if TYPE_CHECKING:
    from book.widgets.live import Live


def bucket_timeline(runs: Trace | Mapping[Any, Trace], replay: Callable[[Trace], Trace] | None = None, *,
                    title: str | None = None, labels: Sequence[str] | None = None,
                    select: Any = None, guess: bool = False) -> BucketTimeline | Live:
    """The backward pass of a recorded run, or of several that the reader chooses from, bucket by bucket.

    `runs` are traces recorded with `follow_backward`, or simulate_backward's, which need no replay; `replay`, a
    book.replay.Replay, gives their events modelled times (`runs` may also have traces that it has made already). The
    order is the recorded one. In a live notebook, runs on NCCL have their measured times. `labels` name the choices
    and `select` is the key to open with. With `guess` all-reduces and figures are shown only once they are played.
    Raises TypeError for anything but traces, ValueError for a trace without a followed backward pass, without times
    or with more than 8 ranks, and for a recorded trace without a replay.
    """
    return show(BucketTimeline(runs, replay, title, labels, select, guess))


TICKS = 100_000  # in the time that lanes show, as in lanes.js
NO_BUCKET = -1
MOST_RANKS, MOST_GRADIENTS = 8, 400
Span = tuple[int, int]


@dataclass(frozen=True)
class BucketGradient:
    """A gradient on one rank: when it was computed, in ticks, and which of the run's buckets it fills (an index)."""

    name: str
    num_bytes: float
    bucket: int
    span: Span


@dataclass(frozen=True)
class BucketAllReduce:
    """An all-reduce as ranks saw it: which of the run's buckets it carries (an index), and when, in ticks."""

    bucket: int
    span: Span
    num_bytes: float


@dataclass
class Backward:
    """What the timeline shows of one trace; buckets are named by (pass, number), in the order they are first filled."""

    world_size: int
    start_s: float
    duration_s: float
    buckets: list[tuple[int, int]] = field(default_factory=list)
    gradients: list[list[BucketGradient]] = field(default_factory=list)  # by rank
    flights: dict[BucketAllReduce, list[int]] = field(default_factory=dict)  # with the ranks that saw each

    def tick(self, time_s: float) -> int:
        """A moment of the trace in ticks."""
        return round((time_s - self.start_s) / self.duration_s * TICKS)

    def seconds(self, tick: int) -> float:
        """How long after the start a tick is."""
        return tick / TICKS * self.duration_s

    def index(self, bucket: tuple[int, int]) -> int:
        """The index of a bucket in `buckets`; a new one is added at the end."""
        if bucket not in self.buckets:
            self.buckets.append(bucket)
        return self.buckets.index(bucket)

    def exposed(self, rank: int) -> list[Span]:
        """When an all-reduce of `rank` runs while none of its gradients is computed, in ticks, in order."""
        computing = [gradient.span for gradient in self.gradients[rank]]
        flying = [flight.span for flight, ranks in self.flights.items() if rank in ranks]
        return _without(flying, computing)


def read_backward(trace: Trace) -> Backward:
    """The gradients, buckets and all-reduces of a followed backward pass with times.

    Raises ValueError for a trace without one, with more ranks or gradients than can be drawn, or that takes no time.
    """
    if trace.world_size > MOST_RANKS:
        raise ValueError(f"the bucket timeline shows up to {MOST_RANKS} ranks, and this trace has {trace.world_size}: "
                         "record fewer, their buckets are the same")
    programs = followed(trace)
    found = overlap(trace)  # raises for an all-reduce that did not end
    if found.step_s <= 0:
        raise ValueError("this replay takes no time: give backward_s_per_byte or the link's latency more than 0 s")
    most = max(sum(event.kind == "compute" for event in program) for program in programs)
    if most > MOST_GRADIENTS:
        raise ValueError(f"the bucket timeline shows up to {MOST_GRADIENTS} gradients a rank, and this trace has "
                         f"{most}: follow one backward pass of a smaller model")
    start_s = min(event.times_s[0] for program in programs for event in program)
    run = Backward(trace.world_size, start_s, found.step_s)
    for program in programs:
        _read_program(run, program)
    return run


def run_payload(trace: Trace, source: str, names: dict[tuple[str, float], int]) -> Data:
    """One run as JSON data; adds new gradients to `names`, by parameter and bytes."""
    run = read_backward(trace)
    ranks: list[Data] = []
    for rank, own in enumerate(run.gradients):
        rows = [[names.setdefault((g.name, g.num_bytes), len(names)), g.bucket, *g.span] for g in own]
        ranks.append({"gradients": rows, "exposed": [list(span) for span in run.exposed(rank)]})
    flights = [{"bucket": f.bucket, "start": f.span[0], "end": f.span[1], "bytes": round(f.num_bytes), "ranks": on}
               for f, on in sorted(run.flights.items(), key=lambda item: (item[0].span, item[0].bucket))]
    found = {name: float(f"{value:.6g}") for name, value in asdict(overlap(trace)).items()}
    return {"n": run.world_size, "source": source, "duration_s": float(f"{run.duration_s:.6g}"),
            "buckets": [number for _, number in run.buckets], "ranks": ranks, "flights": flights,
            "overlap": {**found, "even": all(other == ranks[0] for other in ranks)}}


def _read_program(run: Backward, program: Sequence[Event]) -> None:
    rank, number_of_pass = len(run.gradients), 0
    seen: set[str | None] = set()
    full_s: dict[tuple[int, int], float] = {}  # when each bucket got its last gradient
    gradients: list[BucketGradient] = []
    for event in program:
        if event.kind != "compute":
            continue
        if event.op in seen:  # the same parameter again: another backward pass
            number_of_pass += 1
            seen.clear()
        seen.add(event.op)
        bucket = number_of_pass, NO_BUCKET if event.bucket is None else event.bucket
        full_s[bucket] = event.times_s[1]
        gradients.append(BucketGradient(event.op or "?", event.num_bytes or 0.0, run.index(bucket), _span(run, event)))
    run.gradients.append(gradients)
    for event in program:
        if event.kind == "collective":
            flight = BucketAllReduce(run.index(_carried(event, full_s)), _span(run, event), event.num_bytes or 0)
            run.flights.setdefault(flight, []).append(rank)


def _carried(event: Event, full_s: dict[tuple[int, int], float]) -> tuple[int, int]:
    """Which pass's bucket an all-reduce carries: of those with its number, the last one that was full when it began."""
    number = NO_BUCKET if event.bucket is None else event.bucket
    same = [bucket for bucket in full_s if bucket[1] == number]
    full = [bucket for bucket in same if full_s[bucket] <= event.times_s[0]]
    return max(full or same[:1] or [(0, number)])


def _span(run: Backward, event: Event) -> Span:
    start_s, end_s = event.times_s
    return run.tick(start_s), run.tick(end_s)


def _without(spans: Iterable[Span], others: Iterable[Span]) -> list[Span]:
    """The parts of `spans` that no span of `others` covers, as spans that don't touch, in order."""
    change: dict[int, list[int]] = defaultdict(lambda: [0, 0])
    for kind, of_kind in enumerate((spans, others)):
        for start, end in of_kind:
            change[start][kind] += 1
            change[end][kind] -= 1
    left, depth, since = [], [0, 0], None
    for at in sorted(change):
        depth = [now + by for now, by in zip(depth, change[at])]
        inside = depth[0] > 0 and depth[1] == 0
        if inside and since is None:
            since = at
        elif not inside and since is not None:
            left.append((since, at))
            since = None
    return left


MOST_ROWS, MOST_NAMES = 24, 12  # longer tables are for data, not for reading
TITLE = "One backward pass, bucket by bucket"


class BucketTimeline(Recorded):
    """What a bucket timeline shows: recorded runs by key and the replay that gives their events modelled times."""

    widget, maker = "timeline", "bucket_timeline"

    def __init__(self, runs: Any, replay: Callable[[Trace], Trace] | None, title: str | None = None,
                 labels: Sequence[str] | None = None, select: Any = None, guess: bool = False):
        super().__init__(runs, title, labels, select)
        self._replay, self.title, self._guess = replay, title or TITLE, guess
        self._modelled = {key: self._replayed(trace) for key, trace in self.traces.items()}
        self._data = self._payload(self._modelled, live=False)

    def with_trace(self, what: Any) -> BucketTimeline:
        """The same timeline of another trace."""
        return BucketTimeline({"": what}, self._replay, self.title, guess=self._guess)

    def data(self, live: bool) -> dict[str, Any]:
        """The timeline's data; in a live notebook, runs on GPUs have the times that were measured there."""
        if not live:
            return self._data
        shown = {key: trace if _has_true_times(trace) else self._modelled[key] for key, trace in self.traces.items()}
        return self._payload(shown, live=True)

    def text(self) -> str:
        """One line that says what is shown."""
        return (f"{self.title}: bucket timeline{self.several()}, {self.ranks()}, order {self.sources()}, durations "
                "modelled")

    def words(self) -> str:
        """The figures of each run and, if there is only one, its buckets."""
        rows = [[name, str(len(_numbers(read_backward(trace)))), *_figures(overlap(trace))]
                for name, trace in zip(names_of(self.traces), self._modelled.values())]
        figures = table(rows, ["run", "buckets", "step", "all-reduces", "hidden behind backward", "exposed"])
        return heading(self.title, self._source()) + figures + self._buckets()

    def _source(self) -> str:
        return self._data["runs"][0]["source"]

    def _buckets(self) -> str:
        """A table of the buckets of the run that is shown first."""
        key = next(iter(self.traces)) if self._select is None else self._select
        run = read_backward(self._modelled[key])
        rows = [_bucket_row(run, i) for i in range(len(run.buckets))]
        if len(rows) > MOST_ROWS:
            return ""
        of = f" of {escape(names_of([key])[0])}" if len(self.traces) > 1 else ""
        head = ["bucket", "its gradients, in the order they are ready", "full", "all-reduce"]
        return f"<p>Buckets{of}, as rank 0 sees them:</p>{table(rows, head)}"

    def _replayed(self, trace: Trace) -> Trace:
        if trace.clock == "modelled":
            return trace
        if self._replay is None:
            raise ValueError("a recorded trace needs a replay, Replay(backward_s_per_byte, link): what processes that "
                             "share cores took says nothing of how long it takes elsewhere")
        return self._replay(trace)

    def _payload(self, shown: Mapping[Any, Trace], live: bool) -> dict[str, Any]:
        names: dict[tuple[str, float], int] = {}
        runs = {key: run_payload(trace, source_of(trace, live), names) for key, trace in shown.items()}
        known = {"names": [name for name, _ in names], "sizes": [round(num_bytes) for _, num_bytes in names]}
        return {"title": self.title, **known, **({"guess": True} if self._guess else {}),
                **arranged(runs, self._labels, self._select, integers="run")}


def source_of(trace: Trace, live: bool) -> str:
    """Where a run's order and times come from; the backend is named only if it may differ between machines."""
    if trace.clock == "measured":
        return f"{origin(trace, live)} · durations measured"
    return f"order {origin(trace, live)} · durations modelled"


def _has_true_times(trace: Trace) -> bool:
    """Whether measured times mean something: on GPUs, ranks and NCCL run undisturbed; on gloo all share a few cores.

    A run that hung has all-reduces that never ended, so only modelled times can be drawn.
    """
    return trace.clock == "measured" and trace.backend == "nccl" and all(
        event.end_s is not None for program in followed(trace) for event in program)


def _numbers(run: Backward) -> list[int]:
    return [number for _, number in run.buckets if number != NO_BUCKET]


def _figures(found: Overlap) -> list[str]:
    if not found.communication_s:  # one rank, or nothing sent
        return [_ms(found.step_s), "none", "–", "–"]
    hidden = f"{_ms(found.hidden_s)} ({found.hidden_s / found.communication_s:.0%})"
    return [_ms(found.step_s), _ms(found.communication_s), hidden, _ms(found.exposed_s)]


def _bucket_row(run: Backward, index: int) -> list[str]:
    number = run.buckets[index][1]
    own = [gradient for gradient in run.gradients[0] if gradient.bucket == index]
    flights = [flight.span for flight, ranks in run.flights.items() if flight.bucket == index and 0 in ranks]
    names = ", ".join(f"{g.name} ({g.num_bytes:,.0f} B)" for g in own[:MOST_NAMES])
    names += f" and {len(own) - MOST_NAMES} more" if len(own) > MOST_NAMES else ""
    full = _ms(run.seconds(own[-1].span[1])) if own else "–"
    flown = ", ".join(f"{_ms(run.seconds(start))} to {_ms(run.seconds(end))}" for start, end in flights)
    return ["none" if number == NO_BUCKET else str(number), names, full, flown or "none"]


def _ms(seconds: float) -> str:
    return in_seconds(seconds, "ms")
