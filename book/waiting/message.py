"""L1: the message on a run that hangs: its cause, then where each rank is. It is the same in every run."""
from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

from book.waiting.causes import causes
from book.waiting.doing import Doing, Kind
from book.waiting.hang import Hang, Served, Standing
from book.words import agree, alike, named

NEW_GROUP = "every rank must call it for every group, in the same order, members or not"


def message(hang: Hang, verdict: str, limit_s: float) -> str:
    """What each rank is doing in a run that has stood still ("hang"), is "late", "not started", or "quiet"."""
    waiting = "the ranks wait for one another" if len(hang.ranks) > 1 else "the rank waits"
    first = {
        "hang": f"{waiting}: nothing has moved for {limit_s:g} s",
        "late": f"not done after {limit_s:g} s",
        "quiet": f"no rank has called another for {limit_s:g} s",
        "not started": f"the ranks could not start within {limit_s:g} s",
    }[verdict]
    lines = [first, *causes_told(hang, verdict), *_lines(hang.ranks)]
    if any(standing.main.kind is Kind.CALL and standing.main.operation == "new_group" for standing in hang.ranks):
        lines.append(f"new_group: {NEW_GROUP}")
    return "\n".join(lines)


def causes_told(hang: Hang, verdict: str) -> list[str]:
    """The causes of a run that stands as `verdict` says, a line each."""
    word = "possible cause" if verdict in ("late", "quiet") else "cause"  # a slow run may be caught anywhere
    return [f"{word}: {cause}" for cause in causes(hang)]


def _lines(ranks: Sequence[Standing]) -> Iterator[str]:
    """Where each rank is; ranks that stand at the same place share their lines."""
    found = alike((rank, (_main(standing), standing.place, tuple(_beside(standing))))
                  for rank, standing in enumerate(ranks))
    for (doing, place, beside), who in found.items():
        yield f"  {named(who)} {doing.words(len(who))}" + (f" at {place}" if place else "")
        yield from (f"    {line}" for line in beside)


def _main(standing: Standing) -> Doing:
    """What its main thread is doing: one that does not answer, but is at a line of the learner's, computes there."""
    return Doing(Kind.COMPUTES) if standing.main.kind is Kind.DEAF and standing.place else standing.main


def _beside(standing: Standing) -> Iterator[str]:
    """What a rank's other threads and processes are doing at the same time, for callers over RPC or for itself."""
    yield from _served(standing.worker.calls if standing.worker else ())
    for thread in standing.threads or ():
        yield f"its thread {thread.name} {thread.doing.words()} at {thread.place}"
    for child in standing.children:
        yield f"its {child.name} {child.doing.words()} at {child.place}"


def _served(calls: Iterable[Served]) -> Iterator[str]:
    """Calls that a rank runs for its peers, one line for those at the same place."""
    for (doing, place), count in Counter(calls).items():
        whom = "a peer" if count == 1 else f"its peers, in {count} threads,"
        yield f"for {whom} it {doing.words()} at {place}"


def graph(waits: Mapping[int, Sequence[int]]) -> str:
    """Who waits for whom: "rank 0 waits for rank 1; ranks 1, 2 wait for rank 0"."""
    found = alike((rank, tuple(others)) for rank, others in waits.items())
    return "; ".join(f"{named(who)} {agree('waits', who)} for {named(others)}" for others, who in found.items())
