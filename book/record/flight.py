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
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _dump_fr_trace
from torch.distributed import distributed_c10d

from book.device import message_backends, message_device
from book.look.dumps import FORMAT, call_of, own_flight
from book.look.flights import Call, FlightDump, guilty, verdict
from book.record.files import read_all
from book.record.happens_before import assemble
from book.record.recording import Operation, Recording
from book.trace import Event, Trace

__all__ = ["Call", "FlightDump", "dump", "guilty", "read", "trace", "verdict"]

SIZES = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")  # the buffer's, and its old name
LIBRARIES = tuple(os.path.dirname(os.path.dirname(os.path.realpath(path))) + os.sep
                  for path in (torch.__file__, os.__file__, __file__))


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
    groups = {world.pg_names[group]: tuple(sorted(ranks)) for group, ranks in world.pg_group_ranks.items()
              if group in world.pg_names}  # this rank may not be a member of all
    entries = pickle.loads(_dump_fr_trace(True, lines, False)).get("entries", [])
    calls = [call_of(entry, groups, _callers_line(entry.get("frames", []))) for entry in entries if not entry["is_p2p"]]
    flight = FlightDump(dist.get_rank(), dist.get_world_size(), message_backends()[message_device().type], tuple(calls))
    part = Path(f"{path}.part")
    part.write_text(json.dumps({"format": FORMAT, **asdict(flight)}), "utf-8")
    part.replace(path)


def read(paths: Iterable[str | Path]) -> list[FlightDump]:
    """The dumps of all ranks, by rank, from files in any order; TraceError if one is missing, or is not a dump."""
    return read_all(paths, FORMAT, own_flight, "a dump that flight.dump wrote",
                    "there is no dump of rank {}: a rank that can't dump is dead or holds the GIL")


def trace(flights: Sequence[FlightDump]) -> Trace:
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


def _recording(calls: Sequence[Call]) -> Recording:
    operations = [Operation("collective", call.op, call.group, call.ranks, None, 0, call.num_bytes, call.time_ns)
                  for call in calls]
    log = [(what, index) for index, call in enumerate(calls) for what in ("issue", *(["wait"] if call.done else []))]
    return Recording(operations, log)


def _callers_line(frames: Iterable[Mapping[str, Any]]) -> str:
    """The innermost line of source that is neither torch's nor Python's nor this book's, as it stands there."""
    own = (frame for frame in frames if not os.path.realpath(frame["filename"]).startswith(LIBRARIES))
    return next((linecache.getline(frame["filename"], frame["line"]).strip() for frame in own), "")

