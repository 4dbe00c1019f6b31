"""L2: what the other ranks were doing when one failed: for whom it had waited, who was writing what it read."""
from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from book.launch import where
from book.launch.child import Failure
from book.launch.explain import Waited
from book.launch.files import FailedRead, Write
from book.launch.ranks import RankProcess, Ranks
from book.waiting.hang import Hang
from book.words import alike, joined, named

SLACK_S = 0.05  # how far two clocks may be apart
MOST = 3
STARTS = ("init_process_group", "init_rpc")


class Other(NamedTuple):
    """What is known of a rank when another one's time is up."""
    rank: int
    failure: Failure | None
    has_failed: bool
    is_over: bool  # it has ended well


def meanwhile(ranks: Ranks, first: RankProcess, hang: Hang) -> list[str]:
    """What the others have to do with this failure; nothing if that is not known."""
    failure = first.failure
    if failure is None:
        return []
    others = [Other(member.rank, member.failure, member.failed, member.finished or member.returned) for member in ranks]
    found = [time_up(first.rank, failure.waited, others, hang)] if failure.waited else []
    written: dict[int, Any] = {member.rank: member.notes.written for member in ranks if member.notes}
    return [*found, *(written_late(first.rank, failure.not_read, written) if failure.not_read else ())]


def time_up(first: int, waited: Waited, ranks: Sequence[Other], hang: Hang) -> str:
    """What rank `first` waited in until its time was up, and what those that it waited for do now."""
    limit = f" {waited.limit_s:g} s" if waited.limit_s else ""
    behind = _awaited(first, waited, ranks, hang)
    awaited = [other for other in ranks if other.rank in behind]
    doing = alike((other.rank, _is_at(other, hang)) for other in awaited)
    told = [f"{named(who)}, which {does}" for does, who in list(doing.items())[:MOST]]
    head = f"rank {first} waited{limit} {waited.doing.rest}, and then its time was up"
    if not told:
        return head
    if all(other.is_over for other in awaited):
        return f"{head}. It waited for {joined(told)}: every rank has to make the call"
    operation = waited.doing.operation
    whose = "its timeout=" if operation == "monitored_barrier" else "timeout= of init_process_group" + (
        "" if operation in STARTS else ", or of new_group")
    return f"{head}. It waited for {joined(told)}. If that may take so long, raise {whose}"


def _awaited(first: int, waited: Waited, ranks: Sequence[Other], hang: Hang) -> set[int]:
    """The ranks that one waited for: its peer, else those that have not made the call, else those that still run."""
    message = waited.doing.message
    if message is not None and 0 <= message[1] < len(hang.ranks):
        return {message[1]}
    behind = set()
    for group, last in hang.calls.items():
        own = last.get(first)
        if own is not None and own.name == waited.doing.operation:
            behind |= {rank for rank in group.ranks if rank not in last or last[rank].number < own.number}
    return behind or {other.rank for other in ranks if not other.has_failed and other.rank != first}


def _is_at(other: Other, hang: Hang) -> str:
    """What a rank does now, while another one's time is up."""
    standing = hang.ranks[other.rank]
    if other.failure is not None:
        return f"came later, at {other.failure.places[-1]}" if other.failure.places else "came later"
    doing = standing.main
    words = f"came later: it {doing.words()}" if doing.waits else doing.words()
    return words + (f" at {standing.place}" if standing.place else "")


def written_late(first: int, read: FailedRead, written: Mapping[int, Mapping[str, Write]]) -> Iterator[str]:
    """Whether another rank than `first` has written the file since, or was writing it; `written` has those of each."""
    path, failed_s = read
    changed_s = 0.0
    with suppress(OSError):
        changed_s = time.monotonic() - (time.time() - os.stat(path).st_mtime)
    for rank, files in written.items():
        if path not in files or rank == first:
            continue
        began_s, place = files[path]
        if began_s > failed_s - SLACK_S or changed_s > failed_s - SLACK_S:
            yield (f"rank {rank} writes this file at {where.place_of(*place)}. Rank {first} has read it "
                   "too early: call dist.barrier() on all ranks between the two lines")
            return
