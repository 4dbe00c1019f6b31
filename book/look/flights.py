"""L1: what Flight Recorders noted of a job that hangs: each rank's last collectives, and whom the others wait for.

Dumps may be of some of the ranks only. A group's earliest call that is not done decides, not the last one: on NCCL the
host runs ahead of its GPU and queues further calls behind the one that is stuck.
"""
from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

from book.words import agree, alike, named

EVERYBODY = "0"  # the name of the group that init_process_group makes
# What each rank gives to these may differ in size.
UNEVEN = ("all_gather", "all_to_all", "alltoall", "gather", "scatter", "reduce_scatter")


@dataclass(frozen=True)
class Call:
    """A collective that a rank called: the `number`-th, counted from 1, of its group, whose global ranks are `ranks`.

    `what` says which, with dtype and shape; `line` is the caller's line of source, "" where it is not known. `done`
    says whether it had completed when the rank dumped, `started` whether its kernel was seen to run (with NCCL, and
    `TORCH_NCCL_ENABLE_TIMING=1`), `time_ns` when it was called, on the host's wall clock. No ranks: the dump does not
    say who is in the group.
    """

    group: str
    ranks: tuple[int, ...]
    number: int
    op: str
    what: str
    num_bytes: int
    time_ns: int
    done: bool
    line: str
    started: bool = False
    peer: int | None = None  # of a send or receive, in the world

    @property
    def kind(self) -> str:
        """What all ranks must agree in."""
        return self.op if any(name in self.op for name in UNEVEN) else self.what


@dataclass(frozen=True)
class FlightDump:
    """One rank's dump: its last calls, oldest first; of each group the number of the last call that it had `reached`.

    The buffer forgets old calls, and some dumps have none at all, but the number stays. `messages` are the sends and
    receives that are not done: on NCCL the recorder notes them, on gloo it does not.
    """

    rank: int
    world_size: int
    backend: str
    calls: tuple[Call, ...]
    reached: Mapping[str, int] = field(default_factory=dict)
    messages: tuple[Call, ...] = ()

    def last(self, group: str) -> Call | None:
        """The rank's last call in a group; None if it has made none that is still in the buffer."""
        return next((call for call in reversed(self.calls) if call.group == group), None)

    def at(self, group: str, number: int) -> Call | None:
        """The rank's call with this number in a group; None if it has not made it, or it is no longer in the buffer."""
        return next((call for call in self.calls if (call.group, call.number) == (group, number)), None)

    def number_in(self, group: str) -> int:
        """The number of the rank's last call in a group; 0 if it has made none."""
        last = self.last(group)
        return max(last.number if last else 0, self.reached.get(group, 0))

    def stuck(self, group: str) -> Call | None:
        """The rank's first call in a group that is not done."""
        return next((call for call in self.calls if call.group == group and not call.done), None)


class Due(Enum):
    """Why a call does not end, the surest reason first."""
    NOT_CALLED = auto()
    OTHER_CALL = auto()
    NOT_STARTED = auto()  # in the queue of a GPU that is still at what it was given before
    NO_DUMP = auto()
    UNKNOWN_MEMBERS = auto()
    NOBODY = auto()  # all have made it, alike


@dataclass(frozen=True)
class Wait:
    """The ranks that wait in a group's earliest call which is not done; `late` are those of whom it is `due`."""

    group: str
    number: int
    calls: Mapping[int, Call]
    due: Due
    late: tuple[int, ...]


def waits(flights: Sequence[FlightDump]) -> list[Wait]:
    """Where ranks wait, a group each, by the lowest rank that waits there."""
    groups = dict.fromkeys(call.group for flight in flights for call in flight.calls)
    found = [_wait(name, flights) for name in groups] + [_message(flight, flights) for flight in flights]
    return sorted((wait for wait in found if wait), key=lambda wait: (min(wait.calls), wait.group))


def _wait(group: str, flights: Sequence[FlightDump]) -> Wait | None:
    stuck = {flight.rank: call for flight in flights if (call := flight.stuck(group))}
    if not stuck:
        return None
    number = min(call.number for call in stuck.values())
    calls = {rank: call for rank, call in stuck.items() if call.number == number}
    for due, late in _reasons(group, number, calls, flights):
        if late:
            return Wait(group, number, calls, due, tuple(sorted(late)))
    known = any(call.ranks for call in calls.values())
    return Wait(group, number, calls, Due.NOBODY if known else Due.UNKNOWN_MEMBERS, ())


def _message(flight: FlightDump, flights: Sequence[FlightDump]) -> Wait | None:
    """The first send or receive in which a rank waits and that its peer does not take part in."""
    for call in flight.messages[:1]:
        peer = next((other for other in flights if other.rank == call.peer), None)
        met = peer and any(other.peer == flight.rank and other.op != call.op for other in peer.messages)
        due = Due.NOBODY if met else Due.NOT_CALLED if peer else Due.NO_DUMP
        return Wait(call.group, call.number, {flight.rank: call}, due, () if met or call.peer is None else (call.peer,))
    return None


def _reasons(group: str, number: int, calls: Mapping[int, Call],
             flights: Sequence[FlightDump]) -> Iterator[tuple[Due, set[int]]]:
    """Each reason and the ranks to which it applies."""
    by_rank = {flight.rank: flight for flight in flights}
    members = {rank for call in calls.values() for rank in call.ranks} or _seen_in(group, flights)
    yield Due.NOT_CALLED, {rank for rank in members & by_rank.keys() if by_rank[rank].number_in(group) < number}
    yield Due.OTHER_CALL, _odd_ones(group, number, flights)
    queued = {rank for rank, call in calls.items() if not call.started}
    yield Due.NOT_STARTED, queued if len(queued) < len(calls) else set()
    yield Due.NO_DUMP, members - by_rank.keys()


def _seen_in(group: str, flights: Sequence[FlightDump]) -> set[int]:
    """The ranks that are in a group for sure, where no dump says who is: all that are known are in the first one."""
    if group == EVERYBODY:
        return set(range(max(flight.world_size for flight in flights)))
    return {flight.rank for flight in flights if flight.number_in(group)}


def _odd_ones(group: str, number: int, flights: Sequence[FlightDump]) -> set[int]:
    """The ranks whose call with this number differs from that of most others; of two halves, the one without rank 0."""
    said: dict[str, set[int]] = defaultdict(set)
    for flight in flights:
        if call := flight.at(group, number):
            said[call.kind].add(flight.rank)
    common = max(said.values(), key=lambda ranks: (len(ranks), -min(ranks)))
    return set().union(*(ranks for ranks in said.values() if ranks is not common))


def guilty(flights: Sequence[FlightDump]) -> tuple[int, ...]:
    """The ranks that others wait for and that wait for nobody themselves.

    An empty tuple if no rank waits, if all have made the same call, or if ranks wait in different groups, each for
    another one.
    """
    waits_for: dict[int, set[int]] = defaultdict(set)
    late: set[int] = set()
    for wait in waits(flights):
        late.update(wait.late)
        for rank in wait.calls.keys() - set(wait.late):
            waits_for[rank].update(wait.late)
    return tuple(sorted(rank for rank in late if not waits_for[rank]))


def verdict(flights: Sequence[FlightDump]) -> str | None:
    """Who waits in which call, and what the guilty ranks have done instead, in words; None if no rank waits."""
    return "; ".join(sentences(flights)) or None


def sentences(flights: Sequence[FlightDump]) -> Iterator[str]:
    """The same, one by one."""
    found, blamed = waits(flights), guilty(flights)
    for wait in found:
        by_call = alike((rank, call.what + _at(call)) for rank, call in sorted(wait.calls.items()))
        where = f"call {wait.number}" + (f" of group {wait.group}" if len(found) > 1 else "")
        yield from (f"{named(ranks)} {agree('waits', ranks)} in {where}, {what}" for what, ranks in by_call.items())
    by_rank = {flight.rank: flight for flight in flights}
    for rank in blamed:
        wait = next(wait for wait in found if rank in wait.late)
        if wait.due is not Due.OTHER_CALL or rank not in wait.calls:
            yield _instead(rank, by_rank.get(rank), wait)
    if found and not blamed:
        yield _nobody(found)


def _instead(rank: int, flight: FlightDump | None, wait: Wait) -> str:
    """What a rank did in place of the call that others wait in."""
    if flight is None:
        return (f"there is no dump of rank {rank}, and all others have made the call: it is dead, stopped, or holds "
                "the interpreter lock")
    if wait.due is Due.NOT_STARTED:
        return f"rank {rank} has made the call, and its GPU has not begun it: it is still at what it was given before"
    if any(call.peer is not None for call in wait.calls.values()):
        return f"rank {rank} has no send or receive under way that meets it"
    there = flight.at(wait.group, wait.number)
    last = there or flight.last(wait.group)
    if last is None:
        number = flight.number_in(wait.group)
        return f"rank {rank} " + (f"has reached call {number}" if number else "has made no call in this group")
    whose = f"rank {rank}'s " + (f"call {last.number} was" if there else f"last is call {last.number},")
    return f"{whose} {last.what}{_at(last)}"


def _at(call: Call) -> str:
    return f": {call.line}" if call.line else ""


def _nobody(found: Sequence[Wait]) -> str:
    """Why none of the ranks is to blame."""
    if any(wait.late for wait in found):
        return "each of these ranks waits for another one of them: they make their calls in different orders"
    if any(wait.due is Due.UNKNOWN_MEMBERS for wait in found):
        return "all of these ranks have made this call; the dumps do not say which others are in the group"
    return ("all of its ranks have made this call, alike: look at the network, at the GPUs, and at sizes that may "
            "differ, such as those of all_to_all")
