"""L2: why ranks wait for each other, in a sentence each: from where they are and from the calls on their board.

A rank that waits names what it waits for ("recv from rank 1"), and the board shows which collectives it has called. A
rank that has not reached a collective, a ring of ranks that all send first and a peer that has finished explain most
runs that hang. A rank itself reports what holds it up inside its own process, such as a lock or a parameter without a
gradient.
"""
from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations
from typing import NamedTuple

from book.launch import messages, rpc_causes
from book.launch.agreement import with_place
from book.launch.board import Call, Group
from book.launch.standing import Standing, named, plural

MOST_NAMES = 6  # of parameters
MOST = 3  # sentences; the first ones explain the rest


def causes(ranks: Sequence[Standing], calls: Mapping[Group, Mapping[int, Call]]) -> list[str]:
    """Sentences on why these ranks wait, at most `MOST`; none where that is unknown.

    `calls`: for each group, the last call of each of its ranks that has made one.
    """
    missed = missing(ranks, calls)
    for found in (messages.dropped(ranks), [*_inside(ranks), *rpc_causes.causes(ranks), *_left_out(ranks)],
                  [*messages.astray(ranks), *_crossed(missed)],
                  (sentence for one in missed for sentence in _told(ranks, one)),
                  messages.causes(ranks), _left(ranks)):
        if sentences := list(dict.fromkeys(found)):
            return sentences[:MOST]
    return []


def _inside(ranks: Sequence[Standing]) -> Iterator[str]:
    """A sentence for each rank that waits for something in its own process."""
    for rank, standing in enumerate(ranks):
        if standing.blocked:
            yield f"rank {rank}: {standing.blocked}" if standing.blocked.startswith("its") else (
                f"rank {rank} {standing.blocked}")
        elif standing.doing.endswith(" of the store"):
            which = "which no rank has" if " keys " not in standing.doing else "not all of which have been"
            yield f"rank {rank} {standing.doing}, {which} set"


def _left_out(ranks: Sequence[Standing]) -> Iterator[str]:
    """A sentence for ranks whose loss leaves out parameters, while others wait in backward."""
    waiting = [rank for rank, standing in enumerate(ranks) if standing.doing == "waits in backward"]
    for rank, standing in enumerate(ranks):
        if waiting and standing.left_out and rank not in waiting:
            names = [*standing.left_out[:MOST_NAMES], *["..."] * (len(standing.left_out) > MOST_NAMES)]
            yield (f"{_listed(waiting)} in backward for an all-reduce of DDP; the loss of rank {rank} does not use "
                   f"{', '.join(names)}, so rank {rank} never starts it: use them on every rank, or pass "
                   "find_unused_parameters=True")


class Missing(NamedTuple):
    """A collective that some ranks of a group wait in, and others have not called."""
    waiting: list[int]
    behind: list[int]
    last: Mapping[int, Call]


def missing(ranks: Sequence[Standing], calls: Mapping[Group, Mapping[int, Call]]) -> list[Missing]:
    """The collectives that some ranks wait in and others have not called, one for each group."""
    return [found for group, last in calls.items() if (found := _missing(ranks, group.ranks, last))]


def _missing(ranks: Sequence[Standing], members: Sequence[int], last: Mapping[int, Call]) -> Missing | None:
    """What ranks of a group wait in and others have not called; None if every rank has called it."""
    number = max(call.number for call in last.values())
    waiting = [rank for rank in members if rank in last and last[rank].number == number
               and ranks[rank].doing.startswith("waits")]
    behind = [rank for rank in members if rank not in last or last[rank].number < number]
    return Missing(waiting, behind, last) if waiting and behind else None


def _crossed(missed: Sequence[Missing]) -> Iterator[str]:
    """A sentence on two groups in which each waits for ranks that wait in the other one, if there are such groups."""
    for one, other in combinations(missed, 2):
        if set(one.waiting) & set(other.behind) and set(other.waiting) & set(one.behind):
            first, second = (f"{_listed(group.waiting)} in {_words(group)}" for group in (one, other))
            yield (f"{first} of one group, {second} of another, each for the other: "
                   "call the groups' collectives in the same order on every rank")
            return


def _told(ranks: Sequence[Standing], missing: Missing) -> Iterator[str]:
    """The ranks that have not reached a collective: those that have returned, if any, else what each does instead."""
    returned = [rank for rank in missing.behind if ranks[rank].finished]
    alike: dict[str, list[int]] = {}
    for rank in returned or missing.behind:
        last = missing.last.get(rank)
        before = f"last call in this group: {with_place(last)}" if last else "last call in this group: none"
        does = "returned without it" if returned else f"{ranks[rank].doing} instead"
        alike.setdefault(f"{does} ({before})", []).append(rank)
    for does, who in alike.items():
        yield f"{_listed(missing.waiting)} in {_words(missing)}; {named(who)} {plural(does, len(who))}"


def _words(missing: Missing) -> str:
    call = missing.last[missing.waiting[0]]
    return f"{call.name}({call.arguments})"


def _listed(ranks: Sequence[int]) -> str:
    return f"{named(ranks)} {'waits' if len(ranks) == 1 else 'wait'}"


def _left(ranks: Sequence[Standing]) -> Iterator[str]:
    """A sentence if some ranks wait, as in DDP's own all-reduce, and all others have returned."""
    waiting = [rank for rank, standing in enumerate(ranks) if standing.doing.startswith("waits")]
    returned = [rank for rank, standing in enumerate(ranks) if standing.finished]
    if waiting and returned and len(waiting) + len(returned) == len(ranks):
        does = {ranks[rank].doing for rank in waiting}
        if len(does) == 1:
            has = "has" if len(returned) == 1 else "have"
            yield f"{named(waiting)} {plural(does.pop(), len(waiting))}; {named(returned)} {has} returned"
