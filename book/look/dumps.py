"""L1: read Flight Recorder dumps as torch writes them, a pickle or JSON, and as this book does; run nothing in them.

No dump of torch's says which rank wrote it: the file's name does. A job that hangs rarely leaves all of its dumps, and
some are cut off: what can't be read is said, and the others are used.
"""
from __future__ import annotations

import ast
import io
import json
import os
import pickle
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

from book.look.flights import Call, FlightDump

FORMAT = "lockstep flight 1"  # what book.record.flight.dump writes
BYTES = {"Float": 4, "Double": 8, "Half": 2, "BFloat16": 2, "Int": 4, "Long": 8, "Byte": 1, "Char": 1, "Bool": 1}
MESSAGE = re.compile(r"(send|recv) (\d+)(?:->|<-)(\d+)$")  # between ranks of the group
LIBRARIES = ("/site-packages/", "/dist-packages/", "/lib/python", "/book/tap/", "<")
MOST_RANKS = 1_000_000  # a larger number in a file's name is a date or a time
MOST_NUMBERS = 100_000  # of one call's sizes: a planted dump may repeat one list without end


class DumpError(ValueError):
    """A file that is no dump, or can't be read."""


class _Plain(pickle._Unpickler):  # the one in Python: the one in C takes memory on demand
    """Reads numbers, text and containers; torch's dumps have nothing else."""

    dispatch: ClassVar = {code: read for code, read in pickle._Unpickler.dispatch.items()
                if read.__name__ not in {"load_" + name for name in (
                    "reduce", "build", "global", "stack_global", "inst", "obj", "newobj", "newobj_ex", "ext1", "ext2",
                    "ext4", "persid", "binpersid", "bytearray8", "next_buffer", "readonly_buffer")}}


def read_dumps(paths: Iterable[str | Path]) -> tuple[list[FlightDump], list[str]]:
    """The dumps by rank, and what can't be read, a sentence each. Raises DumpError where names do not tell ranks."""
    read, problems = {}, []
    for path in sorted(map(Path, paths)):
        try:
            read[path] = plain(path)
        except DumpError as error:
            problems.append(str(error))
    found = {rank: (path, read[path]) for path, rank in ranks_of(list(read)).items()}
    world_size = max([rank + 1 for rank in found] + [rank + 1 for _, dump in found.values() for rank in _named(dump)],
                     default=0)
    flights = []
    for rank, (path, dump) in sorted(found.items()):
        try:
            flights.append(flight_of(dump, rank, world_size))
        except (AttributeError, KeyError, TypeError, ValueError, IndexError) as error:
            problems.append(f"{path} is no Flight Recorder dump as torch writes it: {type(error).__name__} {error}")
    return flights, problems


def ranks_of(paths: Sequence[Path]) -> dict[Path, int]:
    """The rank of each file: the number in its name that tells the files apart, the last such one.

    Raises DumpError where there is no such number.
    """
    numbers = [[int(digits) for digits in re.findall(r"\d+", path.name) if int(digits) < MOST_RANKS][::-1]
               for path in paths]
    for place in range(max(map(len, numbers), default=0)):
        ranks = [found[place] for found in numbers if len(found) > place]
        if len(set(ranks)) == len(paths):
            return dict(zip(paths, ranks))
    if len(paths) < 2:
        return dict.fromkeys(paths, 0)
    raise DumpError(f"the names of {paths[0]} and {len(paths) - 1} more do not tell ranks apart: let each end in its "
                    "rank, such as dump_0")


def loaded(path: Path) -> dict[str, Any]:
    """The numbers, text and containers that a pickle or JSON holds; raises DumpError, which names the file."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise DumpError(f"{path} can't be read: {error.strerror}") from None
    if not data:
        raise DumpError(f"{path} is empty: its rank may have died while it wrote")
    try:
        found = json.loads(data) if data.lstrip()[:1] == b"{" else _Plain(io.BytesIO(data)).load()
    except Exception:  # a pickle may fail in any way
        found = None
    if not isinstance(found, dict):
        raise DumpError(f"{path} is neither a Flight Recorder dump, a profiler trace nor a memory snapshot, or its end "
                        "is missing")
    return found


def plain(path: Path) -> dict[str, Any]:
    """What a file holds, if that may be a dump; raises DumpError, which names the file."""
    found = loaded(path)
    if not {"entries", "pg_status", "calls"} & found.keys():
        raise DumpError(f"{path} is no Flight Recorder dump: it has no entries")
    return found


def flight_of(dump: Mapping[str, Any], rank: int, world_size: int) -> FlightDump:
    """A dump of torch's, or of this book's, as a FlightDump."""
    if dump.get("format") == FORMAT:
        return own_flight(dump)
    members = _members(dump)
    entries = [entry for entry in dump.get("entries") or () if not entry["is_p2p"]]
    calls = tuple(call_of(entry, members) for entry in entries)
    reached = {str(name): int(status["last_enqueued_collective"])
               for name, status in (dump.get("pg_status") or {}).items()}
    backend = str(entries[0]["profiling_name"]).partition(":")[0] if entries else ""
    reached = {name: number for name, number in reached.items() if number > 0}
    return FlightDump(rank, world_size, backend, calls, reached, tuple(_open_messages(dump, members)))


def own_flight(dump: Mapping[str, Any]) -> FlightDump:
    """What this book's `dump` wrote."""
    calls = tuple(Call(**{**call, "ranks": tuple(call["ranks"])}) for call in dump["calls"])
    return FlightDump(dump["rank"], dump["world_size"], dump["backend"], calls, dump.get("reached", {}))


def call_of(entry: Mapping[str, Any], members: Mapping[str, tuple[int, ...]], line: str | None = None) -> Call:
    """A collective that torch's recorder noted; without a `line`, the place of the innermost frame of the program."""
    backend, _, op = str(entry["profiling_name"]).partition(":")
    group = str(entry["process_group"][0])
    sizes, dtypes = list(_sizes(entry.get("input_sizes") or ())), entry.get("input_dtypes") or ()
    what = ", ".join(f"{str(dtype).lower()} {size}" for dtype, size in zip(dtypes, sizes))
    num_bytes = sum(BYTES.get(str(dtype), 0) * _product(size) for dtype, size in zip(dtypes, sizes))
    # With gloo the state stays "scheduled" in torch 2.13; NCCL's watchdog also retires what has timed out.
    done = bool(entry.get("retired")) if backend == "gloo" else entry.get("state") == "completed"
    return Call(group, members.get(group, ()), int(entry["collective_seq_id"]), op, f"{op}({what})", num_bytes,
                int(entry.get("time_created_ns") or 0), done, _place(entry) if line is None else line,
                entry.get("state", "scheduled") != "scheduled")


def _open_messages(dump: Mapping[str, Any], members: Mapping[str, tuple[int, ...]]) -> Iterator[Call]:
    """The sends and receives that are not done; those of a batch have one entry together, which names no peer."""
    for entry in dump.get("entries") or ():
        found = MESSAGE.search(str(entry["profiling_name"])) if entry["is_p2p"] else None
        if not found or entry.get("state") == "completed":
            continue
        call, peer = call_of(entry, members), int(found[3])
        peer = call.ranks[peer] if peer < len(call.ranks) else peer
        what = f"{found[1]} {'to' if found[1] == 'send' else 'from'} rank {peer}"
        yield replace(call, number=int(entry["p2p_seq_id"]), op=found[1], what=what, peer=peer)


def _members(dump: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """The ranks of each group that the dump names. With gloo, torch 2.13 names none."""
    return {str(name): _ranks(config) for name, config in (dump.get("pg_config") or {}).items()}


def _ranks(config: Mapping[str, Any]) -> tuple[int, ...]:
    said = config.get("ranks") or ()
    return tuple(sorted(map(int, ast.literal_eval(said) if isinstance(said, str) else said)))


def _named(dump: Mapping[str, Any]) -> list[int]:
    """All ranks that a dump names; none if it is no dump after all."""
    if dump.get("format") == FORMAT:
        return [int(dump.get("world_size", 1)) - 1]
    try:
        return [rank for config in (dump.get("pg_config") or {}).values() for rank in _ranks(config)]
    except (AttributeError, SyntaxError, TypeError, ValueError):
        return []


def _sizes(shapes: Any) -> Iterable[list[int]]:
    left = MOST_NUMBERS
    for shape in shapes:
        left -= len(shape) + 1
        if left < 0:
            raise ValueError("the sizes of one call have no end")
        yield [int(length) for length in shape]


def _place(entry: Mapping[str, Any]) -> str:
    """The innermost frame that is the program's: "train.py:17"; "" where there are no frames."""
    own = (frame for frame in entry.get("frames") or ()
           if not any(part in str(frame["filename"]) for part in LIBRARIES))
    return next((f"{os.path.basename(str(frame['filename']))}:{int(frame['line'])}" for frame in own), "")


def _product(size: Iterable[int]) -> int:
    result = 1
    for length in size:
        result *= length
    return result
