"""L1: PyTorch profiler traces: when a rank computed, when it communicated, and how much of that nothing hid.

On a GPU its kernels and copies count, whatever the host did meanwhile. A trace without kernels is of a CPU: gloo's
operations are its communication, and what autograd and the operators cover is its computing.
"""
from __future__ import annotations

import json
import math
import re
import zlib
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from book.look.spans import common, length, less, union

MOST_BYTES = 4 << 30  # of an unpacked trace
MOST_US = 1e18  # 30,000 years: what no clock says
GZIP = b"\x1f\x8b"
COPIES = ("gpu_memcpy", "gpu_memset", "memcpy", "memset")
MESSAGES = re.compile(r"^(nccl|rccl)(Dev)?Kernel|^gloo:", re.IGNORECASE)  # NCCL has named its kernels so since 2.19
ANNOTATED = ("user_annotation", "cpu_user_annotation")
CALLED = re.compile(r"^nccl:_?(.+?)(?:_base)?$")  # "nccl:_all_gather_base", "nccl:send 0->1"
HOST_CALL = re.compile(r"^c10d::(?!send|recv|.*barrier)")
COMPUTING = ("aten::", "autograd::")
LAUNCHES = ("cuda_runtime", "cuda_driver", "runtime")  # the host's calls of CUDA or HIP
NO_NUMBER = -1
EXPOSED = "exposed communication"  # at times when the rank computes nothing: the one name that sentences have for it
SYNCHRONIZES = re.compile(r"^(cuda|hip|cu)\w*Synchronize")


class TraceFileError(ValueError):
    """A file that is no profiler trace, or can't be read."""


class Interval(NamedTuple):
    """What ran from when to when, in seconds on the rank's own clock; of a message its group, where that is known.

    `track` is the stream of a kernel, and the thread of what the host does; `called` what the host called a message,
    whose kernel may have another name.
    """

    start_s: float
    end_s: float
    name: str
    group: str = ""
    track: str = ""
    called: str = ""


@dataclass(frozen=True)
class Profile:
    """One rank's trace; `rank` is None where it does not say which, `calls` are the host's calls of collectives.

    Of the host of a GPU `host` is what it works on, and `host_waits` when it stands in a call that waits for the GPU.
    `leads` has for each kernel when it began, and how long before that its launch did, in seconds. `annotations` are
    what the program, or PyTorch for it, says that the host is in, beside its steps.
    """

    rank: int | None
    world_size: int
    on_gpu: bool
    computing: tuple[Interval, ...]
    messages: tuple[Interval, ...]
    copies: tuple[Interval, ...]
    calls: tuple[Interval, ...]
    steps: tuple[Interval, ...]
    host: tuple[Interval, ...] = ()
    host_waits: tuple[Interval, ...] = ()
    leads: tuple[tuple[float, float], ...] = ()
    annotations: tuple[Interval, ...] = ()

    @property
    def arrivals(self) -> list[Interval]:
        """For each collective when this rank came to it and when it ended, in order.

        A kernel of NCCL begins when its stream comes to it, and ends with the others. On gloo the host's call is the
        arrival. Its threads run several operations at once, in an order of their own, so a call counts as ended with
        all that overlap its operation.
        """
        if self.on_gpu:
            exchanges = any("alltoall" in call.name for call in self.calls)  # of which NCCL makes sends and receives
            return [one for one in self.messages if exchanges or "SendRecv" not in one.name]
        done = [one for one in self.messages if not one.name.startswith(("gloo:send", "gloo:recv"))]
        begins, busy = [one.start_s for one in done], union(rows_of(done))
        found = []
        for number, call in enumerate(self.calls):
            at = number if len(done) == len(self.calls) else bisect_left(begins, call.start_s)
            if at < len(done):
                end_s = busy[np.searchsorted(busy[:, 1], begins[at], "right"), 1]
                found.append(Interval(call.start_s, float(end_s), call.name))
        return found


@dataclass(frozen=True)
class Times:
    """Seconds of a trace from its first to its last piece of work; `exposed_s` is communication beside no computing."""

    span_s: float
    computing_s: float
    messages_s: float
    exposed_s: float
    idle_s: float


def is_profile(path: Path) -> bool:
    """Whether a file looks like a profiler trace: packed, or with the key that all traces have."""
    try:
        with path.open("rb") as file:
            head = file.read(2)
            return head == GZIP or (head[:1] in b"{ \n" and b'"traceEvents"' in head + file.read())
    except OSError:
        return False


def read_profile(path: Path) -> Profile:
    """A profiler trace, .json or .json.gz; raises TraceFileError for another file."""
    try:
        data = path.read_bytes()
        found = json.loads(_unpacked(data) if data[:2] == GZIP else data)
        events = [event for event in found["traceEvents"] if _is_span(event)]
    except OSError as error:
        raise TraceFileError(f"{path} can't be read: {error.strerror or error}") from None
    except (EOFError, KeyError, RecursionError, TypeError, ValueError, MemoryError, zlib.error) as error:
        raise TraceFileError(f"{path} is no profiler trace, or its end is missing: {type(error).__name__} "
                             f"{error}") from None
    if not events:
        raise TraceFileError(f"{path} is a profiler trace without any work in it")
    return _profile(events, found.get("distributedInfo"))


def _unpacked(data: bytes) -> bytes:
    unpacker = zlib.decompressobj(wbits=31)
    found = unpacker.decompress(data, MOST_BYTES)
    if unpacker.unconsumed_tail:
        raise ValueError(f"it unpacks to over {MOST_BYTES >> 30} GiB")
    if not unpacker.eof:
        raise EOFError("the end is missing")
    return found


def _is_span(event: Any) -> bool:
    return (isinstance(event, dict) and event.get("ph") == "X" and isinstance(event.get("name"), str)
            and all(isinstance(event.get(key), int | float) and abs(event[key]) < MOST_US for key in ("ts", "dur"))
            and event["dur"] >= 0)


def _profile(events: Sequence[Mapping[str, Any]], info: Any) -> Profile:
    spans = defaultdict[str, list[Interval]](list)
    first_us = min(event["ts"] for event in events)  # as a small number it keeps its nanoseconds
    launched = {number: event for event in events if (number := _correlation(event, LAUNCHES)) != NO_NUMBER}
    calls = _Calls(events)
    for event in events:
        start_s = (event["ts"] - first_us) / 1e6
        kind = _kind(event["name"], str(event.get("cat", "")).lower())
        called = calls.around(launched.get(_correlation(event, ("kernel",)))) if kind == "message" else ""
        spans[kind].append(Interval(start_s, start_s + event["dur"] / 1e6, event["name"], _group(event.get("args")),
                                    _track(event), called))
    found = {kind: tuple(sorted(some)) for kind, some in spans.items()}
    info = info if isinstance(info, dict) else {}
    on_gpu = bool(found.get("kernel") or found.get("message"))
    return Profile(info.get("rank") if isinstance(info.get("rank"), int) else None,
                   info["world_size"] if isinstance(info.get("world_size"), int) else 0, on_gpu,
                   found.get("kernel" if on_gpu else "operator", ()),
                   found.get("message" if on_gpu else "gloo", ()), found.get("copy", ()), found.get("call", ()),
                   found.get("step", ()),
                   tuple(sorted(span for kind in ("operator", "host", "call") for span in found.get(kind, ())))
                   if on_gpu else (),
                   found.get("wait", ()), tuple(_leads(events, launched, first_us)) if on_gpu else (),
                   found.get("annotation", ()))


def _track(event: Mapping[str, Any]) -> str:
    """The stream of a kernel or copy, or else the thread."""
    said = event.get("args")
    return str(said["stream"]) if isinstance(said, dict) and "stream" in said else _thread(event)


def _thread(event: Mapping[str, Any]) -> str:
    """The thread of the host, with its process, as others have threads of the same number."""
    return f"{event.get('pid', '')}/{event.get('tid', '')}"


def _correlation(event: Mapping[str, Any], categories: Sequence[str]) -> int:
    """The number that a launch and its kernel share, of an event of these categories; NO_NUMBER for others."""
    said = event.get("args")
    number = said.get("correlation") if isinstance(said, dict) else None
    return number if isinstance(number, int) and str(event.get("cat", "")).lower() in categories else NO_NUMBER


def _leads(events: Sequence[Mapping[str, Any]], launched: Mapping[int, Mapping[str, Any]],
           first_us: float) -> Iterator[tuple[float, float]]:
    """Of each kernel whose launch is in the trace when it began, and by how much its launch had begun before it."""
    for event in events:
        number = _correlation(event, ("kernel",))
        if number in launched:
            yield (event["ts"] - first_us) / 1e6, (event["ts"] - launched[number]["ts"]) / 1e6


class _Calls:
    """The host's calls of NCCL, in which their kernels are launched."""

    def __init__(self, events: Sequence[Mapping[str, Any]]):
        self._by_thread = defaultdict[str, list[tuple[float, float, str]]](list)
        for event in events:
            called = CALLED.match(event["name"])
            if called and not str(event.get("cat", "")).lower().startswith("gpu"):
                self._by_thread[_thread(event)].append((event["ts"], event["ts"] + event["dur"], called[1]))
        for some in self._by_thread.values():
            some.sort()
        self._until = {thread: [*accumulate((end for _, end, _ in some), max)]
                       for thread, some in self._by_thread.items()}

    def around(self, launch: Mapping[str, Any] | None) -> str:
        """The operation whose call, of the same thread, this is launched in, "all_reduce"; "" where none is."""
        if launch is None or (thread := _thread(launch)) not in self._by_thread:
            return ""
        calls, until, at = self._by_thread[thread], self._until[thread], launch["ts"]
        place = bisect_left(calls, (at, math.inf)) - 1
        while place >= 0 and until[place] >= at:  # the innermost is the one that has begun last
            if calls[place][1] >= at:
                return calls[place][2]
            place -= 1
        return ""


def _group(said: Any) -> str:
    """What a message's process group is called: by its description, if it has one that its program gave it."""
    said = said if isinstance(said, dict) else {}
    name, described = (said.get(f"Process Group {what}") for what in ("Name", "Description"))
    if isinstance(described, str) and described not in ("", "undefined"):
        return described
    return f"group {name}" if isinstance(name, str) and name else ""


def _kind(name: str, category: str) -> str:
    """What a span counts as; "" for nothing."""
    if category == "kernel":
        return "message" if MESSAGES.match(name) else "kernel"
    if category in COPIES:
        return "copy"
    if name.startswith("gloo:"):
        return "gloo"
    if HOST_CALL.match(name):
        return "call"
    if name.startswith(COMPUTING):
        return "operator"
    if category in LAUNCHES:
        return "wait" if SYNCHRONIZES.match(name) else "host"
    if name.startswith("ProfilerStep") and not category.startswith("gpu"):
        return "step"
    if category in ANNOTATED:
        return "annotation"
    return "host" if category == "cpu_op" else ""


def times(profile: Profile) -> Times:
    """Where the time of a trace went; all 0 if it has no work."""
    computing, messages, copies = (union(rows_of(some)) for some in (profile.computing, profile.messages,
                                                                     profile.copies))
    busy = union(np.concatenate([computing, messages, copies]))
    span_s = float(busy[-1, 1] - busy[0, 0]) if len(busy) else 0.0
    messages_s = length(messages)
    return Times(span_s, length(computing), messages_s, length(less(messages, computing)),
                 span_s - length(busy))


@dataclass(frozen=True)
class Exposed:
    """Of a group or a step, by its name, the seconds of communication, and of those beside no computing."""

    name: str
    messages_s: float
    exposed_s: float


def exposed_by_group(profile: Profile) -> list[Exposed]:
    """Each group's communication, most exposed first; none where the trace does not name the groups of its messages.

    Where groups communicate at once, each counts the time in full.
    """
    computing, groups = union(rows_of(profile.computing)), defaultdict[str, list[Interval]](list)
    for message in profile.messages:
        groups[message.group].append(message)
    if not groups.keys() - {""}:
        return []
    found = []
    for name, some in groups.items():
        messages = union(rows_of(some))
        found.append(Exposed(name or "no group named", length(messages), length(less(messages, computing))))
    return sorted(found, key=lambda one: -one.exposed_s)


def exposed_by_step(profile: Profile) -> list[Exposed]:
    """Each ProfilerStep's communication, in order; what runs outside of all steps counts in none.

    A step is the time that the host spends in it: what a GPU still has to do at its end counts in the next.
    """
    computing, messages = (union(rows_of(some)) for some in (profile.computing, profile.messages))
    found = []
    for step in profile.steps:
        inside = common(messages, np.array([step[:2]]))
        found.append(Exposed(step.name, length(inside), length(less(inside, computing))))
    return found


def rows_of(spans: Iterable[Interval]) -> np.ndarray:
    """When spans began and ended: a row for each."""
    return np.array([span[:2] for span in spans]).reshape(-1, 2)


def by_name(spans: Iterable[Interval]) -> list[tuple[str, int, float]]:
    """Of each kind of message its name, how many there are, and their seconds; most seconds first."""
    found: dict[str, list[float]] = defaultdict(list)
    for span in spans:
        found[short_name(span.name)].append(span.end_s - span.start_s)
    return sorted(((name, len(some), sum(some)) for name, some in found.items()), key=lambda one: -one[2])


def short_name(name: str) -> str:
    """The operation that a kernel of NCCL, or an operation of gloo, stands for: "AllReduce", "all_reduce"."""
    kernel = re.match(r"^[nr]ccl(?:Dev)?Kernel_(\w+?)(?:_[A-Z0-9]+_|_Sum|\(|$)", name, re.IGNORECASE)
    return kernel[1] if kernel else name.removeprefix("gloo:").partition("(")[0]
