"""L2: recordings of ranks on several hosts: each rank saves its own, and they are merged with their clocks aligned.

CLOCK_MONOTONIC starts at a different moment on each host. Before a rank saves, it asks rank 0 for its time, again and
again, and keeps the answer with the shortest round trip: rank 0 read its clock in the middle of that trip, give or take
half of it (cristian1989). This needs a process group and nothing else, so it works under torchrun.
"""
from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from book.device import message_backends, message_device
from book.record.files import read_all
from book.record.happens_before import assemble
from book.record.recorder import collect, paused
from book.record.recording import Gradient, Hold, MessageChunk, Operation, Origin, Recording
from book.trace import Event, Trace

FORMAT = "lockstep recording 1"
NUM_TRIPS = 40


@dataclass(frozen=True)
class Saved:
    """A rank's recording; `offset_ns` added to its times gives rank 0's, wrong by at most `bound_ns`."""

    rank: int
    world_size: int
    backend: str
    offset_ns: int
    bound_ns: int
    recording: Recording


def save(path: str | Path) -> None:
    """Write what this rank has done so far to a file. All ranks call it, each with a path of its own.

    In a `finally` through which an error passes, a rank asks no other for its time, since that one may wait in a
    collective for ever: its clock then counts as rank 0's, as it is on one host.

    Call it before `dist.destroy_process_group()`; `merge` makes the trace of all files. Raises RuntimeError where
    nothing was recorded: `record.start()` comes before `dist.init_process_group()`.
    """
    offset_ns = bound_ns = 0
    if sys.exc_info()[0] is None:
        with paused():
            offset_ns, bound_ns = _offset_from_rank_0()
    recording = collect()
    if recording is None:
        raise RuntimeError("nothing was recorded: call record.start() before dist.init_process_group()")
    backend = message_backends()[message_device().type]
    saved = Saved(dist.get_rank(), dist.get_world_size(), backend, offset_ns, bound_ns, recording)
    emitted = Trace(recording.emitted, saved.world_size, "measured", "instrumented").to_json()
    plain = asdict(replace(saved, recording=replace(recording, emitted=[])))
    Path(path).write_text(json.dumps({"format": FORMAT, "emitted": json.loads(emitted), **plain}), "utf-8")


def merge(paths: Iterable[str | Path]) -> Trace:
    """The trace of all ranks, from the files that they saved, in any order, with rank 0's clock for all.

    Its `clock_error_s` says how far off two ranks' times may be relative to each other. Raises TraceError where a file
    is no recording, a rank is missing or is there twice, or a message would arrive before it was sent.
    """
    ranks = read_all(paths, FORMAT, _parsed, "a recording that record.save wrote",
                     "there is no file from rank {}: every rank saves one with record.save")
    bounds = sorted(saved.bound_ns for saved in ranks)[-2:]
    return assemble([_shifted(saved.recording, saved.offset_ns) for saved in ranks], backend=ranks[0].backend,
                    clock_error_s=sum(bounds) / 1e9)


def _offset_from_rank_0() -> tuple[int, int]:
    """Nanoseconds to add to this rank's clock to get rank 0's, and by how many they may be off."""
    rank, found = dist.get_rank(), (0, 0)
    for peer in range(1, dist.get_world_size()):
        if rank == 0:
            _tell_time(peer)
        elif rank == peer:
            found = _ask_time()
    return found


def _tell_time(peer: int) -> None:
    asked = torch.empty(1, dtype=torch.int64, device=message_device())
    for _ in range(NUM_TRIPS):
        dist.recv(asked, peer)
        dist.send(torch.full_like(asked, time.monotonic_ns()), peer)


def _ask_time() -> tuple[int, int]:
    """Ask rank 0 for its time; the answer with the shortest round trip counts."""
    told, trips = torch.zeros(1, dtype=torch.int64, device=message_device()), []
    for _ in range(NUM_TRIPS):
        start_ns = time.monotonic_ns()
        dist.send(told, 0)
        dist.recv(told, 0)
        end_ns = time.monotonic_ns()
        trips.append((end_ns - start_ns, int(told) - (start_ns + end_ns) // 2))
    trip_ns, offset_ns = min(trips)
    return offset_ns, trip_ns // 2 + 1


def _shifted(recording: Recording, by_ns: int) -> Recording:
    """The same recording on a clock that is `by_ns` ahead."""
    def later(row: Any, *names: str, by: float = by_ns) -> Any:
        return replace(row, **{name: getattr(row, name) + by for name in names if getattr(row, name) is not None})

    return replace(recording, operations=[later(row, "start_ns", "end_ns") for row in recording.operations],
                   holds=[later(row, "time_ns") for row in recording.holds],
                   gradients=[later(row, "start_ns", "end_ns") for row in recording.gradients],
                   emitted=[later(row, "start_s", "end_s", by=by_ns / 1e9) for row in recording.emitted])


def _parsed(plain: dict[str, Any]) -> Saved:
    """What `save` wrote."""
    emitted = Trace.from_json(json.dumps(plain.pop("emitted"))).events
    return Saved(**{**plain, "recording": _recording(plain["recording"], emitted)})


def _recording(plain: Mapping[str, Any], emitted: Sequence[Event]) -> Recording:
    pieces = [tuple(MessageChunk(**_tuples(piece)) for piece in row["pieces"]) for row in plain["operations"]]
    operations = [Operation(**{**_tuples(row), "pieces": each}) for row, each in zip(plain["operations"], pieces)]
    return Recording(operations, [(what, index) for what, index in plain["log"]],
                     [Hold(**_tuples(row)) for row in plain["holds"]],
                     [Gradient(**_tuples(row)) for row in plain["gradients"]], list(emitted),
                     [Origin(**_tuples(row)) for row in plain["origins"]])


def _tuples(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row with tuples in place of lists: JSON has only lists."""
    return {name: tuple(value) if isinstance(value, list) else value for name, value in row.items()}
