"""L1: a profiler trace stream by stream: what each stream of a GPU, and its host, did in one step of a job.

A step has thousands of kernels, and a picture some hundred pixels. So neighbours of one kind that are nearer to one
another than a pixel become one block, which keeps their number, for how long they ran, and the name of most of that.
"""
from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from statistics import median, median_low

import numpy as np

from book.look.arrivals import Arrivals
from book.look.profiles import Interval, Profile, rows_of, short_name
from book.look.spans import common, length, less, union

COMPUTING, MESSAGES, COPY, HOST, WAITS = KINDS = "computing", "communication", "copy", "host works", "host waits"
BOTH = "host works and waits"
KEPT = Path(__file__).parent / "data" / "nccl_step.json"
PIXELS = 900  # that the time of a picture gets at most
WIDE = 3  # pixels: what is seen apart from a neighbour as wide, though nothing is between them
MOST_BLOCKS, MOST_RANKS, MOST_NAME = 2400, 8, 44
MOST_EXCHANGES = 12  # that are shown of a trace without steps
BACKWARD = "autograd::engine::evaluate_function: "
MOST_EXPOSED, MOST_GAPS = 5, 3  # that are told one by one


@dataclass(frozen=True)
class StreamBlock:
    """Neighbours of one kind: from when to when, in seconds; how many, for how long they ran, and of most the name."""

    kind: str
    start_s: float
    end_s: float
    name: str
    count: int
    busy_s: float


@dataclass(frozen=True)
class StreamLane:
    """One stream of a rank, or its host."""

    rank: int
    name: str
    blocks: tuple[StreamBlock, ...]


@dataclass(frozen=True)
class StreamShares:
    """A rank's seconds of each kind, of the `duration_s` that are shown of it.

    `ahead_s` is from launch to kernel, in the median; None where no launch is known.
    """

    rank: int
    computing_s: float
    messages_s: float
    exposed_s: float
    idle_s: float
    ahead_s: float | None
    duration_s: float


@dataclass(frozen=True)
class StreamMoment:
    """A stretch of a rank's time that costs: exposed communication, or nothing at all (name "")."""

    rank: int
    start_s: float
    end_s: float
    name: str
    host: str = ""  # what the host did in most of it
    said: str = ""  # the innermost annotation that covers most of it
    said_s: float = 0.0  # how much of it


@dataclass(frozen=True)
class Streams:
    """What is shown of traces: `chosen` says which time, and why; `one_clock` whether ranks can be compared in it.

    `late` is the rank that the others wait for; None where none stands out, or nothing is known of that.
    """

    chosen: str
    duration_s: float
    one_clock: bool
    lanes: tuple[StreamLane, ...]
    shares: tuple[StreamShares, ...]
    moments: tuple[StreamMoment, ...]
    left_out: int  # ranks
    late: int | None = None

    def to_json(self) -> str:
        """As JSON, times in seconds."""
        return json.dumps(asdict(self), separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> Streams:
        """What `to_json` has written; raises KeyError or TypeError for anything else."""
        found = json.loads(text)
        lanes = tuple(StreamLane(**{**lane, "blocks": tuple(StreamBlock(**block) for block in lane["blocks"])})
                      for lane in found["lanes"])
        return cls(**{**found, "lanes": lanes, "shares": tuple(StreamShares(**one) for one in found["shares"]),
                      "moments": tuple(StreamMoment(**one) for one in found["moments"])})


def kept_step() -> Streams:
    """The step of a public trace that chapter 13 draws: data/SOURCES.md says where it is from."""
    return Streams.from_json(KEPT.read_text("utf-8"))


def streams_of(profiles: Sequence[Profile], found: Arrivals | None = None) -> Streams | None:
    """One step of these traces, on one clock where `found` has aligned them; None for traces without work.

    Of more than MOST_RANKS traces the first are shown, and the one that the others wait for.
    """
    every = list(range(len(profiles)))
    late = found.late_position if found else None  # a place
    kept = sorted(every, key=lambda place: (place != late, place))[:MOST_RANKS]
    shown = [profiles[place] for place in sorted(kept)]
    ranks = [place if profiles[place].rank is None else profiles[place].rank or 0 for place in sorted(kept)]
    offsets = [found.offsets_s[place] for place in sorted(kept)] if found else None
    chosen = _window(shown, offsets)
    if chosen is None:
        return None
    words, windows = chosen
    durations_s = [end_s - start_s for start_s, end_s in windows]
    duration_s = max(durations_s)
    if duration_s <= 0:
        return None
    clipped = [_clipped(profile, window) for profile, window in zip(shown, windows)]
    shares = [_shares(rank, profile, own_s) for rank, profile, own_s in zip(ranks, clipped, durations_s)]
    return Streams(words, duration_s, offsets is not None or len(shown) == 1, tuple(_lanes(ranks, clipped, duration_s)),
                   tuple(shares), tuple(_moments(ranks, clipped, durations_s)), len(profiles) - len(shown),
                   None if late is None else ranks[sorted(kept).index(late)])


Window = tuple[float, float]


def _window(profiles: Sequence[Profile], offsets: Sequence[float] | None) -> tuple[str, list[Window]] | None:
    """Which time is shown, in words, and of each trace from when to when that is by its own clock.

    It is the step of median length of those that all traces have, without the first of many, in which a profiler
    starts; of traces without steps their last exchanges, or all.
    """
    first, *others = profiles
    busy = [union(rows_of([*one.computing, *one.messages, *one.copies])) for one in profiles]
    if not all(map(len, busy)):
        return None
    names = set.intersection(*({step.name for step in one.steps} for one in profiles))
    steps = [step for step in first.steps if step.name in names and len(common(busy[0], np.array([step[:2]])))]
    steps = steps[len(steps) > 2:]
    if steps:
        lengths = [step.end_s - step.start_s for step in steps]
        name = steps[lengths.index(median_low(lengths))].name
        of = {1: "the only whole step", 2: "the shorter of 2 steps"}.get(
            len(steps), f"of median length among {len(steps)} steps")
        own = [next(step[:2] for step in one.steps if step.name == name) for one in profiles]
        return f"{name}, {of}", _on_one_clock(own, offsets)
    own = [(float(rows[0, 0]), float(rows[-1, 1])) for rows in busy]
    if len(first.messages) <= MOST_EXCHANGES:
        return "no step is marked, so all that the trace has", _on_one_clock(own, offsets)
    own = [(one.messages[-MOST_EXCHANGES].start_s if len(one.messages) > MOST_EXCHANGES else start_s, end_s)
           for one, (start_s, end_s) in zip(profiles, own)]
    return f"no step is marked, so the last {MOST_EXCHANGES} exchanges", _on_one_clock(own, offsets)


def _on_one_clock(own: Sequence[Window], offsets: Sequence[float] | None) -> list[Window]:
    """Of one clock all that any trace has of the windows, equally long for all; of several each trace's own."""
    if offsets is None:
        return [*own]
    start_s = min(start_s + offset for (start_s, _), offset in zip(own, offsets))
    end_s = max(end_s + offset for (_, end_s), offset in zip(own, offsets))
    return [(start_s - offset, end_s - offset) for offset in offsets]


def _clipped(profile: Profile, window: Window) -> Profile:
    """What of a trace is in a window, with times from its start."""
    def inside(spans: Iterable[Interval]) -> tuple[Interval, ...]:
        return tuple(span._replace(start_s=max(span.start_s, window[0]) - window[0],
                                   end_s=min(span.end_s, window[1]) - window[0])
                     for span in spans if span.end_s > window[0] and span.start_s < window[1])

    leads = tuple(lead for lead in profile.leads if window[0] <= lead[0] <= window[1])
    return Profile(profile.rank, profile.world_size, profile.on_gpu, inside(profile.computing),
                   inside(profile.messages), inside(profile.copies), (), (), inside(profile.host),
                   inside(profile.host_waits), leads, inside(profile.annotations))


def _shares(rank: int, profile: Profile, duration_s: float) -> StreamShares:
    some = profile.computing, profile.messages, profile.copies
    computing, messages, copies = (union(rows_of(spans)) for spans in some)
    busy = union(np.concatenate([computing, messages, copies]))
    ahead_s = median(lead for _, lead in profile.leads) if profile.leads else None
    return StreamShares(rank, length(computing), length(messages), length(less(messages, computing)),
                        duration_s - length(busy), ahead_s, duration_s)


def _moments(ranks: Sequence[int], profiles: Sequence[Profile], durations_s: Sequence[float]) -> list[StreamMoment]:
    """The longest stretches of exposed communication and of nothing at all, in order of their ends."""
    exposed, gaps = list[tuple[float, float, int]](), list[tuple[float, float, int]]()
    for place, profile in enumerate(profiles):
        computing, messages = union(rows_of(profile.computing)), union(rows_of(profile.messages))
        busy = union(np.concatenate([computing, messages, rows_of(profile.copies)]))
        exposed += [(float(start_s), float(end_s), place) for start_s, end_s in less(messages, computing)]
        gaps += [(float(start_s), float(end_s), place)
                 for start_s, end_s in less(np.array([[0.0, durations_s[place]]]), busy)]
    found = [StreamMoment(ranks[place], start_s, end_s, _sent(profiles[place], start_s, end_s))
             for start_s, end_s, place in _longest(exposed)[:MOST_EXPOSED]]
    found += [StreamMoment(ranks[place], start_s, end_s, "", _host(profiles[place], start_s, end_s),
                           *_said(profiles[place], start_s, end_s))
              for start_s, end_s, place in _longest(gaps)[:MOST_GAPS]]
    return sorted(found, key=lambda one: one.end_s)


def _longest(stretches: Sequence[tuple[float, float, int]]) -> list[tuple[float, float, int]]:
    return sorted(stretches, key=lambda one: one[0] - one[1])


def _sent(profile: Profile, start_s: float, end_s: float) -> str:
    """The message that takes most of a stretch."""
    return _most((span.called or span.name, min(span.end_s, end_s) - max(span.start_s, start_s))
                 for span in profile.messages if span.start_s < end_s and span.end_s > start_s)


def _host(profile: Profile, start_s: float, end_s: float) -> str:
    """What the host does in most of a stretch: BOTH if only work and waits together are that; "" if they are not."""
    gap, waits = np.array([[start_s, end_s]]), union(rows_of(profile.host_waits))
    does = {HOST: length(common(less(union(rows_of(profile.host)), waits), gap)), WAITS: length(common(waits, gap))}
    most = max(does, key=lambda kind: does[kind])
    half_s = (end_s - start_s) / 2
    return most if does[most] > half_s else BOTH if sum(does.values()) > half_s else ""


def _said(profile: Profile, start_s: float, end_s: float) -> tuple[str, float]:
    """The innermost annotation that covers most of a stretch, and how much of it in seconds; "" and 0 without one."""
    covers = [(span.end_s - span.start_s, min(span.end_s, end_s) - max(span.start_s, start_s), span.name)
              for span in profile.annotations]
    most = [each for each in covers if each[1] > (end_s - start_s) / 2]
    if not most:
        return "", 0.0
    _, seconds, name = min(most)
    return _cut(name), seconds


def _lanes(ranks: Sequence[int], profiles: Sequence[Profile], duration_s: float) -> list[StreamLane]:
    """The lanes of all ranks, merged as far as needed to stay below MOST_BLOCKS."""
    apart_s = duration_s / PIXELS
    while True:
        found = [StreamLane(rank, name, tuple(_blocks(kinds, apart_s))) for rank, profile in zip(ranks, profiles)
                 for name, kinds in _lanes_of(profile)]
        if sum(len(lane.blocks) for lane in found) <= MOST_BLOCKS or apart_s >= duration_s:
            return found
        apart_s *= 1.5


def _lanes_of(profile: Profile) -> list[tuple[str, dict[str, list[Interval]]]]:
    """Names of a rank's lanes, and what each has of each kind: the host, then streams in the order of their numbers."""
    if not profile.on_gpu:
        return [("CPU", {COMPUTING: _outermost(profile.computing)}), ("gloo", {MESSAGES: list(profile.messages)})]
    by_stream: dict[str, dict[str, list[Interval]]] = defaultdict(dict)
    for kind, spans in ((COMPUTING, profile.computing), (MESSAGES, profile.messages), (COPY, profile.copies)):
        for span in spans:
            by_stream[span.track].setdefault(kind, []).append(span)
    order = sorted(by_stream, key=lambda name: (not name.isdecimal(), int(name) if name.isdecimal() else 0, name))
    host = {HOST: _outermost(profile.host), WAITS: list(profile.host_waits)}
    return [("CPU", host)] * any(host.values()) + [(f"stream {name}", by_stream[name]) for name in order]


def _outermost(spans: Sequence[Interval]) -> list[Interval]:
    """Without operators that another one of the thread has called."""
    found, until_s = [], defaultdict[str, float](float)
    for span in sorted(spans, key=lambda one: (one.start_s, -one.end_s)):
        if span.end_s > until_s[span.track]:
            until_s[span.track] = span.end_s
            found.append(span)
    return found


def _blocks(kinds: dict[str, list[Interval]], apart_s: float) -> list[StreamBlock]:
    """Neighbours of a kind that are less than this apart as one, unless both are wide; in order of their starts."""
    found = []
    for kind, spans in kinds.items():
        some: list[Interval] = []
        end_s = 0.0
        for span in sorted(spans):
            shorter_s = min(span.end_s - span.start_s, end_s - some[0].start_s) if some else 0.0
            if some and (span.start_s - end_s > apart_s or shorter_s > WIDE * apart_s):
                found.append(_block(kind, some, end_s))
                some = []
            end_s = max(end_s, span.end_s) if some else span.end_s
            some.append(span)
        found += [_block(kind, some, end_s)] if some else []
    return sorted(found, key=lambda block: block.start_s)


def _block(kind: str, some: Sequence[Interval], end_s: float) -> StreamBlock:
    name = _most((one.called or one.name, one.end_s - one.start_s) for one in some)
    return StreamBlock(kind, some[0].start_s, end_s, name, len(some), length(union(rows_of(some))))


def _most(named: Iterable[tuple[str, float]]) -> str:
    """The name of which there are most seconds, made short."""
    found = defaultdict[str, float](float)
    for name, seconds in named:
        found[short_kernel(name)] += seconds
    return max(found, key=lambda name: found[name])


@cache
def short_kernel(name: str) -> str:
    """A kernel's name without what its templates and namespaces say: "vectorized_elementwise_kernel", "AllReduce"."""
    text = short_name(name.replace("(anonymous namespace)::", "")).removeprefix("void ").removeprefix(BACKWARD)
    head, *inside = re.split(r"<(?!-)", text, maxsplit=1)  # "recv 0<-1" has no template
    head = head.partition("(")[0].rstrip()
    if "::" in head and head.rpartition("::")[2].lower() == "kernel":  # of CUTLASS, whose template says which
        head = re.split(r"[<>,(]", inside[0])[0] if inside else head
    if not head.startswith(("aten::", "c10d::")):
        head = head.rpartition("::")[2]
    return _cut(head.strip() or name)


def _cut(name: str) -> str:
    return name if len(name) <= MOST_NAME else name[:MOST_NAME - 1] + "…"
