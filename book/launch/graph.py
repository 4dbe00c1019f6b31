"""L2: which rank waits for which others: the graph over the ranks of a run that hangs."""
from __future__ import annotations

from collections.abc import Mapping, Sequence

from book.launch import rpc_causes
from book.launch.board import Call, Group
from book.launch.causes import missing
from book.launch.standing import Standing, named


def waits_for(ranks: Sequence[Standing], calls: Mapping[Group, Mapping[int, Call]]) -> dict[int, tuple[int, ...]]:
    """For each rank that waits, the ranks that it waits for; `calls` as in `causes`.

    A rank in a collective waits for those that have not called it, one in a send, a receive or a call for its peer.
    """
    found: dict[int, set[int]] = {}
    for group in missing(ranks, calls):
        for rank in group.waiting:
            found.setdefault(rank, set()).update(group.behind)
    for rank, standing in enumerate(ranks):
        peer = standing.peer[1] if standing.peer else rpc_causes.called(ranks, standing)
        if peer is not None and 0 <= peer < len(ranks):
            found[rank] = {peer}
    return {rank: tuple(sorted(others)) for rank, others in sorted(found.items())}


def in_words(waits: Mapping[int, Sequence[int]]) -> str:
    """The graph in a sentence: "rank 0 waits for rank 1, ranks 1, 2 wait for rank 0"."""
    alike: dict[tuple[int, ...], list[int]] = {}
    for rank, others in waits.items():
        alike.setdefault(tuple(others), []).append(rank)
    return "; ".join(f"{named(who)} wait{'s' * (len(who) == 1)} for {named(others)}" for others, who in alike.items())
