"""L2: what a rank of a job says of itself, in a file of its own that is replaced as a whole."""
from __future__ import annotations

import os
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:  # a rank writes its first file before its script has imported anything
    from book.audit import Notes
    from book.launch.child import Failure
    from book.launch.files import Write
    from book.waiting.hang import CollectiveCall, Group, Standing

FOLDER, HANG_S, END_HUNG, JUDGED = "LOCKSTEP_FOLDER", "LOCKSTEP_HANG_S", "LOCKSTEP_END_HUNG", "LOCKSTEP_JUDGED"
DEFAULT_HANG_S = 10.0
OTHERS_S = 8.0  # for other ranks to say what they have called, after one has found that calls differ
BOARD = "board"


class Mismatch(NamedTuple):
    """What a rank was about to do that can't be right, in words, and what was known at that moment: later calls say
    nothing of it."""
    words: str
    time_s: float  # as in Told
    calls: Mapping[Group, Mapping[int, CollectiveCall]]  # the last ones of all ranks
    standings: Mapping[int, Standing]  # of this rank, and of the others that have said since what they had called


class Told(NamedTuple):
    """What a rank said at `time_s`, by time.monotonic(), which is one clock for all processes of a host."""
    rank: int
    world_size: int
    host_ranks: range  # of this host
    pid: int
    time_s: float
    entered: bool = False  # whether it has come to init_process_group
    ended: bool = False  # whether its script has
    serial: int = 0  # of its last call
    still_s: float = 0.0
    standing: Standing | None = None  # None while it moves
    failure: Failure | None = None
    mismatch: Mismatch | None = None  # the first
    totals: Mapping[tuple[Group, str], tuple[int, int]] = {}  # by group and operation: calls, bytes
    notes: Notes | None = None
    written: Mapping[str, Write] = {}  # the files that it has begun to write, by full path
    noted: tuple[tuple[str, ...], tuple[Group, ...], bool] | None = None  # what the numbers in its ring stand for
    host: int = 0  # this host's number, and how many there are
    num_hosts: int = 1
    store: tuple[str, int] = ("", 0)  # where the store of torchrun's agents listens


def moved_by(told: Told, by_s: float) -> Told:
    """What a rank said, with its times moved: to the clock of another host."""
    mismatch = told.mismatch and told.mismatch._replace(time_s=told.mismatch.time_s + by_s)
    return told._replace(time_s=told.time_s + by_s, mismatch=mismatch)


def stood(said: Mapping[int, Told], first: Mismatch) -> dict[int, Standing]:
    """How ranks stood when `first` was found, as far as that is known; what they had said before is of earlier calls.
    """
    found = dict(first.standings)
    for rank, its in said.items():
        standing = its.mismatch.standings[rank] if its.mismatch else its.standing
        if standing and (its.ended or its.mismatch or its.time_s >= first.time_s):
            found.setdefault(rank, standing)
    return found


def attempt_folder(folder: str, attempt: int) -> Path:
    """Where the ranks of one start report: torchrun may start them again."""
    return Path(folder, f"attempt{attempt}")


def latest(folder: str) -> Path | None:
    """The folder of the last start; None before the first."""
    found = sorted(Path(folder).glob("attempt*"), key=lambda path: int(path.name.removeprefix("attempt")))
    return found[-1] if found else None


def stacks_file(folder: Path, rank: int) -> Path:
    """Where a rank's threads are written if it can't say so itself."""
    return folder / f"rank{rank}.stacks"


def ring_file(folder: Path, rank: int) -> Path:
    """Where a rank notes its calls and phases."""
    return folder / f"rank{rank}.ring"


def write(folder: Path, told: Told) -> None:
    """Replace a rank's file."""
    new = folder / f"rank{told.rank}.new"
    new.write_bytes(pickle.dumps(told))
    os.replace(new, folder / f"rank{told.rank}.told")


def read(folder: Path) -> dict[int, Told]:
    """What each rank of this host has said last."""
    found = [pickle.loads(path.read_bytes()) for path in sorted(folder.glob("rank*.told"))]
    return {told.rank: told for told in found}
