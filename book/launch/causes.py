"""L2: why ranks wait for each other, in a sentence each: from where they are and from the calls on their board.

A rank that waits names what it waits for ("recv from rank 1"), and the board tells which collectives it has called. A
rank that has not come to a collective, a ring of ranks that all send first and a peer that has finished explain most
runs that hang.
"""
from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations, groupby
from typing import NamedTuple

from book.launch.agreement import with_place
from book.launch.board import Call

LONG_RUN = 5  # ranks in a row that are named by their ends
MOST = 3  # sentences: the first of them explain the others
_WAITS_FOR = re.compile(r"waits (?:in|for its) (i?send|i?recv) (?:to|from) rank (\d+)")


class Standing(NamedTuple):
    """What a rank does: "waits in recv from rank 1", "finished"; whether a message came for a request it dropped."""
    doing: str
    dropped: bool = False

    @property
    def finished(self) -> bool:
        """Whether the rank's function has returned."""
        return self.doing == "finished" or self.doing.startswith("has returned")

    @property
    def peer(self) -> tuple[str, int] | None:
        """What it waits for from which rank: ("recv", 1)."""
        found = _WAITS_FOR.match(self.doing)
        return (found[1].removeprefix("i"), int(found[2])) if found else None


def causes(ranks: Sequence[Standing], calls: Mapping[str, Mapping[int, Call]]) -> list[str]:
    """Sentences on why these ranks wait, at most `MOST`; none where that is unknown.

    `calls`: for each group, by its name and its ranks, the last call of each of its ranks that has made one.
    """
    if dropped := [rank for rank, standing in enumerate(ranks) if standing.dropped]:
        has = "has" if len(dropped) == 1 else "have"
        return [f"{named(dropped)} {has} dropped what isend or irecv returned before it was done: keep it, and call "
                "wait() on it"]
    missed = [missing for group, last in calls.items() if (missing := _missing(ranks, group, last))]
    crossed = _crossed(missed)
    found = [crossed] if crossed else [sentence for missing in missed for sentence in _told(ranks, missing)]
    return list(dict.fromkeys(found or list(_messages(ranks)) or _left(ranks)))[:MOST]


class _Missing(NamedTuple):
    """A collective that some ranks of a group wait in, and others have not called."""
    waiting: list[int]
    behind: list[int]
    last: Mapping[int, Call]


def _missing(ranks: Sequence[Standing], group: str, last: Mapping[int, Call]) -> _Missing | None:
    """What ranks of a group wait in and others have not called; None if there is nothing of this kind."""
    if not group.endswith("]"):
        return None  # it has too many ranks for its name on the board
    members = [int(rank) for rank in re.findall(r"\d+", group.partition(" ")[2])]
    number = max(call.number for call in last.values())
    waiting = [rank for rank in members if rank in last and last[rank].number == number
               and ranks[rank].doing.startswith("waits")]
    behind = [rank for rank in members if rank not in last or last[rank].number < number]
    return _Missing(waiting, behind, last) if waiting and behind else None


def _crossed(missed: Sequence[_Missing]) -> str | None:
    """A sentence on two groups in which each waits for ranks that wait in the other one; None without such groups."""
    for one, other in combinations(missed, 2):
        if set(one.waiting) & set(other.behind) and set(other.waiting) & set(one.behind):
            first, second = (f"{_listed(group.waiting)} in {_words(group)}" for group in (one, other))
            return (f"{first} of one group, {second} of another, each for the others: "
                    "call the groups in the same order on every rank")
    return None


def _told(ranks: Sequence[Standing], missing: _Missing) -> Iterator[str]:
    """Who has not come to a collective: those that have returned if there are any, else what each does instead."""
    returned = [rank for rank in missing.behind if ranks[rank].finished]
    alike: dict[str, list[int]] = {}
    for rank in returned or missing.behind:
        last = missing.last.get(rank)
        before = f"last call in this group: {with_place(last.words)}" if last else "last call in this group: none"
        does = "returned without it" if returned else f"{ranks[rank].doing} instead"
        alike.setdefault(f"{does} ({before})", []).append(rank)
    for does, who in alike.items():
        yield f"{_listed(missing.waiting)} in {_words(missing)}; {named(who)} {plural(does, len(who))}"


def _words(missing: _Missing) -> str:
    return missing.last[missing.waiting[0]].words.partition("\n")[0]


def _listed(ranks: Sequence[int]) -> str:
    return f"{named(ranks)} {'waits' if len(ranks) == 1 else 'wait'}"


def named(ranks: Sequence[int]) -> str:
    """Ranks in words, runs of five and more by their ends: "rank 2", "ranks 0, 1, 4-63"."""
    runs = [[rank for _, rank in run] for _, run in groupby(enumerate(ranks), lambda pair: pair[1] - pair[0])]
    parts = [f"{run[0]}-{run[-1]}" if len(run) >= LONG_RUN else ", ".join(map(str, run)) for run in runs]
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(parts)}"


def plural(does: str, num: int) -> str:
    """What `num` ranks do: "wait in recv" for "waits in recv" if there are several."""
    return re.sub(r"^(wait|compute|sleep)s\b", r"\1", re.sub(r"^has\b", "have", does)) if num > 1 else does


def _messages(ranks: Sequence[Standing]) -> Iterator[str]:
    """For each rank that waits in a send or a receive: why its peer does not meet it."""
    for rank, standing in enumerate(ranks):
        if standing.peer is None or not 0 <= standing.peer[1] < len(ranks):
            continue
        verb, peer = standing.peer
        other = ranks[peer]
        if other.finished:
            yield f"rank {rank} {standing.doing}, which has returned"
        elif other.peer is None:
            yield f"rank {rank} {standing.doing}, which {other.doing}"
        elif other.peer == ("recv" if verb == "send" else "send", rank):
            pair = sorted((rank, peer))
            yield f"ranks {pair[0]} and {pair[1]} send and receive past each other: compare tag= and group="
        else:
            yield from _circle(ranks, rank, verb)


def _circle(ranks: Sequence[Standing], first: int, verb: str) -> Iterator[str]:
    """A sentence if ranks in a circle, from `first` on, wait in the same way for the next one."""
    circle, rank = [first], first
    while (found := ranks[rank].peer) and found[0] == verb and found[1] < len(ranks) and found[1] not in circle:
        rank = found[1]
        circle.append(rank)
    if found and found == (verb, first):
        yield f"{named(sorted(circle))} all " + {
            "send": "send first, and nobody receives: let one of them receive first, or use isend",
            "recv": "receive first, and nobody sends: let one of them send first"}[verb]


def _left(ranks: Sequence[Standing]) -> Iterator[str]:
    """A sentence if some ranks wait, as in DDP's own all-reduce, and all others have returned."""
    waiting = [rank for rank, standing in enumerate(ranks) if standing.doing.startswith("waits")]
    returned = [rank for rank, standing in enumerate(ranks) if standing.finished]
    if waiting and returned and len(waiting) + len(returned) == len(ranks):
        does = {ranks[rank].doing for rank in waiting}
        if len(does) == 1:
            has = "has" if len(returned) == 1 else "have"
            yield f"{named(waiting)} {plural(does.pop(), len(waiting))}; {named(returned)} {has} returned"
