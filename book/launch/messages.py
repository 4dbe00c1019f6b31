"""L2: why ranks wait in sends and receives: which calls do not match, and which requests were dropped."""
from __future__ import annotations

from collections.abc import Iterator, Sequence

from book.launch.standing import Standing, named

OTHER_SIDE = {"send": "recv", "recv": "send"}


def dropped(ranks: Sequence[Standing]) -> Iterator[str]:
    """A sentence for each line at which ranks dropped a request whose peer now waits for its message."""
    who_dropped: dict[tuple[str, str], set[int]] = {}
    missed = set()  # lines whose messages a rank waits for
    for rank, standing in enumerate(ranks):
        for request in standing.dropped:
            line, verb = (request.call, request.place), OTHER_SIDE[request.call.removeprefix("i")]
            who_dropped.setdefault(line, set()).add(rank)
            peers = range(len(ranks)) if request.peer is None else [request.peer]
            if any(_meets(ranks[peer], verb, rank) for peer in peers if 0 <= peer < len(ranks)):
                missed.add(line)
    alike = {line: sorted(who) for line, who in who_dropped.items() if line in missed}
    for (call, place), who in alike.items():
        yield (f"{named(who)} did not keep what {call} returned; when Python drops a request, its message is lost: "
               f"keep it, and call wait() on it. Look at {place}")
    polled = [rank for rank, standing in enumerate(ranks) if standing.polled]
    if polled and not alike:
        has = "seems to have" if len(polled) == 1 else "seem to have"
        yield (f"{named(polled)} {has} dropped what isend or irecv returned before it was done: keep it, and call "
               "wait() on it")


def _meets(standing: Standing, verb: str, rank: int) -> bool:
    """Whether a rank waits in `verb` ("send" or "recv") with `rank`, or may do so: the peer or the call is unknown."""
    unknown = standing.doing == "waits for a request" or (verb == "recv" and "recv from any rank" in standing.doing)
    return unknown or standing.peer == (verb, rank)


def astray(ranks: Sequence[Standing]) -> Iterator[str]:
    """A sentence for each rank that sends to one rank while another one waits to receive from it."""
    for rank, standing in enumerate(ranks):
        verb, peer = standing.peer or ("", -1)
        others = [other for other, its in enumerate(ranks) if its.peer == ("recv", rank)]
        if verb == "send" and 0 <= peer < len(ranks) and others and peer not in others and (
                ranks[peer].peer is None and not ranks[peer].finished):
            yield (f"rank {rank} {standing.doing}, while {named(others)} wait{'s' * (len(others) == 1)} in recv from "
                   f"rank {rank}: compare dst= and src=")


def causes(ranks: Sequence[Standing]) -> Iterator[str]:
    """For each rank that waits in a send or a receive: why its peer makes no matching call."""
    for rank, standing in enumerate(ranks):
        if standing.peer is None or not 0 <= standing.peer[1] < len(ranks):
            continue
        verb, peer = standing.peer
        other = ranks[peer]
        if other.finished:
            yield f"rank {rank} {standing.doing}, which has returned"
        elif other.peer is None:
            yield f"rank {rank} {standing.doing}, which {other.doing}"
        elif other.peer == (OTHER_SIDE[verb], rank):
            pair = sorted((rank, peer))
            yield (f"the send and the receive of ranks {pair[0]} and {pair[1]} do not match: compare tag= and "
                   "group=")
        else:
            yield from _circle(ranks, rank, verb)


def _circle(ranks: Sequence[Standing], first: int, verb: str) -> Iterator[str]:
    """A sentence if ranks in a circle, from `first` on, wait in the same way for the next one."""
    circle, rank = [first], first
    while (found := ranks[rank].peer) and found[0] == verb and found[1] < len(ranks) and found[1] not in circle:
        rank = found[1]
        circle.append(rank)
    if found != (verb, first):
        return
    circle.sort()
    if len({ranks[rank].place for rank in circle}) > 1:
        yield (f"{named(circle)} wait for each other in a circle, at different lines: the orders of their sends and "
               "receives do not match")
    else:
        yield f"{named(circle)} all " + {
            "send": "send first, and nobody receives: let one of them receive first, or use isend",
            "recv": "receive first, and nobody sends: let one of them send first"}[verb]
