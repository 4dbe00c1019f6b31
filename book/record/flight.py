"""L2: PyTorch's Flight Recorder: what each rank's process groups were last asked to do, dumped while the ranks hang.

The recorder is a ring buffer in torch, of 2000 calls unless `TORCH_FR_BUFFER_SIZE` says otherwise when a rank starts;
0 switches it off. It notes collectives, with the lines that called them, and whether they are done. With gloo in torch
2.13 it notes no sends or receives, and no time but that of the call.
"""
from __future__ import annotations

import json
import linecache
import os
import pickle
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _dump_fr_trace
from torch.distributed import distributed_c10d

from book.device import message_backends, message_device
from book.record.files import read_all
from book.record.happens_before import assemble
from book.record.recording import Operation, Recording
from book.trace import Event, Trace
from book.waiting.doing import Doing, Kind
from book.waiting.hang import Collective, Group, Hang, Standing
from book.words import agree, named

FORMAT = "lockstep flight 1"
SIZES = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")  # the buffer's, and its old name
BYTES = {"Float": 4, "Double": 8, "Half": 2, "BFloat16": 2, "Int": 4, "Long": 8, "Byte": 1, "Char": 1, "Bool": 1}
LIBRARIES = tuple(os.path.dirname(os.path.dirname(os.path.realpath(path))) + os.sep
                  for path in (torch.__file__, os.__file__, __file__))


@dataclass(frozen=True)
class Call:
    """A collective that a rank called: the `number`-th, counted from 1, of its group, whose global ranks are `ranks`.

    `what` says which, with dtype and shape; `line` is the caller's line of source, "" where it is not known. `done`
    says whether it had completed when the rank dumped, `started` whether its kernel was seen to run (with NCCL, and
    `TORCH_NCCL_ENABLE_TIMING=1`), `time_ns` when it was called, on the host's wall clock.
    """

    group: str
    ranks: tuple[int, ...]
    number: int
    op: str
    what: str
    num_bytes: int
    time_ns: int
    done: bool
    line: str
    started: bool = False


@dataclass(frozen=True)
class Flight:
    """One rank's dump: its last calls, oldest first."""

    rank: int
    world_size: int
    backend: str
    calls: tuple[Call, ...]

    def last(self, group: str) -> Call | None:
        """The rank's last call in a group; None if it has made none that is still in the buffer."""
        return next((call for call in reversed(self.calls) if call.group == group), None)

    def at(self, group: str, number: int) -> Call | None:
        """The rank's call with this number in a group; None if it has not made it, or it is no longer in the buffer."""
        return next((call for call in self.calls if (call.group, call.number) == (group, number)), None)


def dump(path: str | Path, lines: bool = False) -> None:
    """Write what this rank's Flight Recorder holds to a file; call it from any thread, also while the rank hangs.

    `lines` adds the line of source that made each call. Torch loads its compiler to name the first one, which takes
    some seconds; `import torch._inductor.codecache` at the start of the program avoids that delay later. Raises
    RuntimeError where the recorder is off or there is no process group.
    """
    if not dist.is_initialized():
        raise RuntimeError("there is no process group, so there is nothing to dump")
    if int(next((os.environ[name] for name in SIZES if name in os.environ), "2000")) < 1:
        raise RuntimeError("the Flight Recorder is off: set TORCH_FR_BUFFER_SIZE=2000 before the ranks start")
    world = distributed_c10d._world
    groups = {world.pg_names[group]: sorted(ranks) for group, ranks in world.pg_group_ranks.items()
              if group in world.pg_names}  # this rank may not be a member of all
    entries = pickle.loads(_dump_fr_trace(True, lines, False)).get("entries", [])
    calls = [_call(entry, groups) for entry in entries if not entry["is_p2p"]]
    flight = Flight(dist.get_rank(), dist.get_world_size(), message_backends()[message_device().type], tuple(calls))
    part = Path(f"{path}.part")
    part.write_text(json.dumps({"format": FORMAT, **asdict(flight)}), "utf-8")
    part.replace(path)


def read(paths: Iterable[str | Path]) -> list[Flight]:
    """The dumps of all ranks, by rank, from files in any order; TraceError if one is missing, or is not a dump."""
    return read_all(paths, FORMAT, _parsed, "a dump that flight.dump wrote",
                    "there is no dump of rank {}: a rank that can't dump is dead or holds the GIL")


def _parsed(plain: dict[str, Any]) -> Flight:
    """What `dump` wrote."""
    calls = [Call(**{**call, "ranks": tuple(call["ranks"])}) for call in plain.pop("calls")]
    return Flight(**plain, calls=tuple(calls))


def trace(flights: Sequence[Flight]) -> Trace:
    """The calls of all ranks as one trace, in which the calls of one collective are in one step.

    Chunk k stands for the k-th step: each rank brings its own call to it, and has all of the group's once the call is
    done. The recorder doesn't note when a program waited, so every call that is done counts as waited for at once.
    Calls that some rank's buffer has already dropped are left out.
    """
    firsts: dict[str, int] = defaultdict(int)
    for flight in flights:
        own: dict[str, int] = {}
        for call in flight.calls:
            firsts[call.group] = max(firsts[call.group], own.setdefault(call.group, call.number))
    kept = [[call for call in flight.calls if call.number >= firsts[call.group]] for flight in flights]
    called = assemble([_recording(calls) for calls in kept], backend=flights[0].backend)
    events = [event for flight, calls in zip(flights, kept) for event in _with_holds(called, flight.rank, calls)]
    events.sort(key=lambda event: (event.step or 0, event.rank))
    return Trace(events, len(flights), "measured", "recorded", backend=flights[0].backend, hangs=verdict(flights))


def _with_holds(called: Trace, rank: int, calls: Sequence[Call]) -> Iterator[Event]:
    """A rank's calls, and what its chunks hold before and after them."""
    world_size, num_steps = called.world_size, called.num_steps
    mine = {event.step or 0: (event, call) for event, call in zip(called.of_rank(rank), calls)}
    for step in range(num_steps):
        before = [float(step in mine and other == rank) for other in range(world_size)]
        yield Event(rank, "hold", chunk=step, step=0, start_s=0.0, end_s=0.0, contributions=tuple(before))
    for step, (event, call) in mine.items():
        yield event
        if call.done:
            full = tuple(float(other in call.ranks) for other in range(world_size))
            yield Event(rank, "hold", call.op, chunk=step, step=step, start_s=event.start_s, end_s=event.start_s,
                        contributions=full)


def guilty(flights: Sequence[Flight]) -> tuple[int, ...]:
    """The ranks that others wait for and that wait for nobody; if there are none, those that call something else.

    On NCCL a rank whose GPU is stuck has made the call: it is the one whose call has not started where others' has.
    An empty tuple if no rank waits, or if ranks wait in different groups, each for another one.
    """
    return tuple(sorted(hang_of(flights).awaited or _not_started(flights) or _odd_ones(flights)))


def hang_of(flights: Sequence[Flight]) -> Hang:
    """What the dumps tell of a run that hangs, for `book.waiting`: a rank waits in its first call that is not done."""
    ranks, calls = [], defaultdict[Group, dict[int, Collective]](dict)
    for flight in flights:
        stuck = next(iter(_open(flight)), None)
        ranks.append(Standing(Doing(Kind.CALL, stuck.op) if stuck else Doing(Kind.UNKNOWN)))
        for call in sorted(flight.calls, key=lambda call: (call is stuck, call.number)):  # the last one stays
            last = Collective(call.number, call.what, call.line, done=call is not stuck)
            calls[Group(call.group, call.ranks)][flight.rank] = last
    return Hang(ranks, calls)


def verdict(flights: Sequence[Flight]) -> str | None:
    """Who waits in which call, and what the guilty ranks have done instead, in words; None if no rank waits."""
    stuck = {flight.rank: open_calls[-1] for flight in flights if (open_calls := _open(flight))}
    if not stuck:
        return None
    groups: dict[tuple[str, int, str], list[int]] = defaultdict(list)
    for rank, call in sorted(stuck.items()):
        groups[call.group, call.number, call.what].append(rank)
    says = [f"{named(ranks)} {agree('waits', ranks)} in call {number}, {what}"
            for (_, number, what), ranks in groups.items()]
    for rank in guilty(flights):
        if rank not in stuck:
            says.append(_instead(flights[rank], next(call for call in stuck.values() if rank in call.ranks)))
    return "; ".join(says)


def _instead(flight: Flight, awaited: Call) -> str:
    """What a rank did in place of the call that others wait in."""
    there = flight.at(awaited.group, awaited.number)
    last = there or flight.last(awaited.group)
    if last is None:
        return f"rank {flight.rank} has made no call in this group"
    whose = f"rank {flight.rank}'s " + (f"call {last.number} was" if there else f"last is call {last.number},")
    return f"{whose} {last.what}" + (f": {last.line}" if last.line else "")


def _open(flight: Flight) -> list[Call]:
    return [call for call in flight.calls if not call.done]


def _not_started(flights: Sequence[Flight]) -> set[int]:
    """The ranks whose next call is only in the GPU's queue, while another rank's call of that number has started."""
    first: dict[tuple[str, int], dict[int, bool]] = defaultdict(dict)
    for flight in flights:
        for call in _open(flight)[:1]:
            first[call.group, call.number][flight.rank] = call.started
    return {rank for ranks in first.values() if any(ranks.values()) for rank, started in ranks.items() if not started}


def _odd_ones(flights: Sequence[Flight]) -> set[int]:
    """The ranks whose call with some number in a group, at which a rank waits, differs from that of most others."""
    odd: set[int] = set()
    for waiting in {(call.group, call.number) for flight in flights for call in _open(flight)[:1]}:
        said: dict[str, set[int]] = defaultdict(set)
        for flight in flights:
            if call := flight.at(*waiting):
                said[call.what].add(flight.rank)
        common = max(said.values(), key=lambda ranks: (len(ranks), -min(ranks)))
        odd.update(*(ranks for ranks in said.values() if ranks is not common))
    return odd


def _recording(calls: Sequence[Call]) -> Recording:
    operations = [Operation("collective", call.op, call.group, call.ranks, None, 0, call.num_bytes, call.time_ns)
                  for call in calls]
    log = [(what, index) for index, call in enumerate(calls) for what in ("issue", *(["wait"] if call.done else []))]
    return Recording(operations, log)


def _call(entry: Mapping[str, Any], groups: Mapping[str, Sequence[int]]) -> Call:
    op = entry["profiling_name"].partition(":")[2]
    dtypes, sizes = entry["input_dtypes"], entry["input_sizes"]
    what = ", ".join(f"{dtype.lower()} {size}" for dtype, size in zip(dtypes, sizes))
    num_bytes = sum(BYTES.get(dtype, 0) * _product(size) for dtype, size in zip(dtypes, sizes))
    return Call(entry["process_group"][0], tuple(groups[entry["process_group"][0]]), entry["collective_seq_id"], op,
                f"{op}({what})", num_bytes, entry["time_created_ns"], entry["retired"],
                _callers_line(entry.get("frames", [])), entry["state"] != "scheduled")


def _callers_line(frames: Iterable[Mapping[str, Any]]) -> str:
    """The innermost line of source that is neither torch's nor Python's nor this book's, as it stands there."""
    own = (frame for frame in frames if not os.path.realpath(frame["filename"]).startswith(LIBRARIES))
    return next((linecache.getline(frame["filename"], frame["line"]).strip() for frame in own), "")


def _product(size: Iterable[int]) -> int:
    result = 1
    for length in size:
        result *= length
    return result
