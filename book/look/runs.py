"""L1: what `lockstep run --out DIR` leaves: run.json says what was said, and which rings hold the notes of ranks."""
from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from book.look.timelines import NUM_BYTES, Timeline, timeline_of
from book.waiting.hang import Group
from book.waiting.standstill import STANDS, Common, Stand, Standstill, WaitFor

FILE, FORMAT = "run.json", "lockstep run 2"
ENDED, HUNG, FAILED, INTERRUPTED = STATES = ("ended", "hung", "failed", "interrupted")
Totals = Mapping[tuple[Group, str], tuple[int, int]]  # by group and operation: calls, bytes


class RunFileError(ValueError):
    """A file that tells of no run, or can't be read."""


@dataclass(frozen=True)
class JobRun:
    """A job: how it ended, what was said of it, the notes of its ranks, what they called, and why it hung."""

    state: str
    said: tuple[str, ...]
    timelines: tuple[Timeline, ...]
    totals: Totals
    cause: str  # of a hang, as it was told; "" if it has none
    standstill: Standstill | None = None  # of a hang


def is_run(path: Path) -> bool:
    """Whether a file has the name that such a file has."""
    return path.name == FILE


def write_run(folder: Path, state: str, said: Sequence[str], rings: Mapping[str, Timeline], totals: Totals,
              cause: str, standstill: Standstill | None = None) -> None:
    """Tell of a run in its folder; `rings` are the files with the ranks' notes, by their paths there."""
    ranks = [{"ring": path, "rank": each.rank, "names": each.names, "on_gpu": each.on_gpu,
              "groups": [list(group) for group in each.groups]} for path, each in rings.items()]
    sums = [{"group": list(group), "name": name, "calls": calls, "bytes": size}
            for (group, name), (calls, size) in totals.items()]
    new = folder / f"{FILE}.new"
    told = {"format": FORMAT, "state": state, "said": said, "ranks": ranks, "totals": sums, "cause": cause,
            "standstill": standstill}
    new.write_text(json.dumps(told), "utf-8")
    new.replace(folder / FILE)


def read_run(path: Path) -> JobRun:
    """The run that a run.json tells of; raises RunFileError, which names the file, where that can't be."""
    try:
        found = json.loads(path.read_bytes())
        if found["format"] != FORMAT or found["state"] not in STATES:
            raise ValueError("another format")
        timelines = [_timeline(path.parent, rank) for rank in found["ranks"]]
        totals = {(_group(one["group"]), str(one["name"])): (int(one["calls"]), int(one["bytes"]))
                  for one in found["totals"]}
        return JobRun(found["state"], tuple(map(str, found["said"])), tuple(timelines), totals,
                      str(found["cause"]), _standstill(found.get("standstill")))
    except OSError as error:
        raise RunFileError(f"{error.filename or path} can't be read: {error.strerror}") from None
    except (KeyError, TypeError, ValueError, RecursionError, OverflowError) as error:
        raise RunFileError(f"{path} tells of no run, or is damaged: {type(error).__name__} {error}") from None


def _timeline(folder: Path, rank: Mapping[str, Any]) -> Timeline:
    file = folder / rank["ring"]
    if not file.resolve().is_relative_to(folder.resolve()):
        raise ValueError(f"{rank['ring']} lies elsewhere")
    memory = file.read_bytes()
    if len(memory) != NUM_BYTES:
        raise ValueError(f"{rank['ring']} has {len(memory)} bytes and not {NUM_BYTES}")
    found = timeline_of(int(rank["rank"]), memory, tuple(map(str, rank["names"])), tuple(map(_group, rank["groups"])),
                        bool(rank["on_gpu"]))
    for rows in (found.calls, found.phases):
        times = np.concatenate([rows[name] for name in ("start_s", "waits_s", "end_s")])
        if not np.isfinite(times).all() or (times < 0).any():
            raise ValueError(f"{rank['ring']} has times that no clock shows")
    return found


def _standstill(told: Any) -> Standstill | None:
    """What `write_run` has written of a hang; runs of earlier versions have nothing of it."""
    if told is None:
        return None
    stands, common = told
    return Standstill(tuple(map(_stand, stands)),
                      common and Common(_group(common[0]), int(common[1]), str(common[2])))


def _stand(told: Any) -> Stand:
    rank, state, does, place, waits = told
    return Stand(int(rank), STANDS[STANDS.index(state)], str(does), str(place),
                 tuple(WaitFor(str(kind), tuple(map(int, ranks))) for kind, ranks in waits))


def _group(told: Any) -> Group:
    name, ranks = told
    return Group(str(name), tuple(int(rank) for rank in ranks))
