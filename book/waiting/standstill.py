"""L1: a hang as its picture needs it: what each rank does, in which wait for which others, and what all had done."""
from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

from book.waiting.doing import Kind
from book.waiting.hang import CollectiveCall, Group, Hang
from book.waiting.message import graph
from book.words import alike, named

WAITS, OWN_CODE, STOPPED, DEAD, SILENT, ENDED, UNKNOWN = STANDS = (
    "waits", "in its own code", "stopped", "dead", "does not answer", "has ended", "not known")
_STATE = {Kind.COMPUTES: OWN_CODE, Kind.SLEEPS: OWN_CODE, Kind.IDLE: OWN_CODE, Kind.STOPPED: STOPPED, Kind.DEAF: SILENT,
          Kind.SILENT: SILENT, Kind.RETURNED: ENDED, Kind.FINISHED: ENDED, Kind.UNKNOWN: UNKNOWN}
MOST_TOLD = 3


class WaitFor(NamedTuple):
    """What a rank waits in, "all_reduce" or "recv", and for which ranks."""
    kind: str
    ranks: tuple[int, ...]


class Stand(NamedTuple):
    """A rank: its state, one of STANDS; what it does, "waits in recv from rank 1"; the line; its waits."""
    rank: int
    state: str
    does: str
    place: str
    waits: tuple[WaitFor, ...]


class Common(NamedTuple):
    """The last call that all ranks of a group had made before they hung: its number in the group, and which it was."""
    group: Group
    number: int
    what: str


class Standstill(NamedTuple):
    """A hang: its ranks, and what they had done together before; None if that is nothing, or not known."""
    stands: tuple[Stand, ...]
    common: Common | None


def standstill(hang: Hang, dead: Collection[int] = ()) -> Standstill:
    """What is known of a hang; the processes of `dead` ranks are gone."""
    stands = []
    for rank, standing in enumerate(hang.ranks):
        state, does = _STATE.get(standing.doing.kind, WAITS), standing.doing.words()
        if state == OWN_CODE:
            does += ", in its own code"
        if rank in dead and state != ENDED:
            state, does = DEAD, "is dead: its process is gone"
        stands.append(Stand(rank, state, does, standing.place, () if state == DEAD else tuple(_waits(hang, rank))))
    return Standstill(tuple(stands), _common(hang))


def _waits(hang: Hang, rank: int) -> Iterator[WaitFor]:
    """For whom a rank waits, as `Hang.waits` has it, each with what it waits in."""
    others, doing = hang.waits.get(rank, ()), hang.ranks[rank].doing
    if not others:
        yield from _in_other_calls(hang, rank)
        return
    called = {one.last[rank].name: one.behind for one in hang.missing if rank in one.waiting}
    if doing.message or hang.callee(rank) is not None or not called:
        yield WaitFor(doing.message[0] if doing.message else doing.operation, others)
        return
    for name, behind in called.items():
        yield WaitFor(name, tuple(behind))


def _in_other_calls(hang: Hang, rank: int) -> Iterator[WaitFor]:
    """For those who are in another call than this rank where all should be in the same."""
    for group, last in hang.calls.items():
        mine = last.get(rank)
        if mine is None or not _is_in(hang, rank, mine):
            continue
        others = tuple(one for one in group.ranks if one in last and _is_in(hang, one, last[one])
                       and last[one].number == mine.number and _same(last[one]) != _same(mine))
        if others:
            yield WaitFor(mine.name, others)


def _is_in(hang: Hang, rank: int, last: CollectiveCall) -> bool:
    """Whether a rank that waits is in its last call, as far as that is known: DDP does not tell of its own."""
    return last.done is False or (last.done is None and hang.ranks[rank].doing.waits)


def _same(call: CollectiveCall) -> tuple[str, str]:
    """What of a call is the same on all ranks: in an exchange of uneven parts the tensors are not."""
    return call.name, "" if "all_to_all" in call.name else call.arguments


def _common(hang: Hang) -> Common | None:
    """Of the group that ranks wait in, else of the largest that has made a call."""
    waiting = {one.group: one.waiting for one in hang.missing}
    for group in [*waiting, *sorted(hang.calls, key=lambda one: -len(one.ranks))]:
        last = hang.calls[group]
        number = min(_number_done(last.get(rank), rank in waiting.get(group, ())) for rank in group.ranks)
        if number > 0:
            return Common(group, number, _what(hang, group, last, number))
    return None


def _number_done(last: CollectiveCall | None, waits: bool) -> int:
    """The number of a rank's last call that is done."""
    return last.number - (waits or last.done is False) if last else 0


def _what(hang: Hang, group: Group, last: Mapping[int, CollectiveCall], number: int) -> str:
    """The call of a group with this number, as far as ranks still know it."""
    known = [call.what for call in last.values() if call.number == number]
    histories = [history for standing in hang.ranks if (history := standing.calls.get(group))]
    known += [one.at(number).call for one in histories if 0 <= one.total - number < len(one.last)]
    return known[0] if known else "a collective"


def waits_told(stands: Sequence[Stand]) -> str:
    """Who waits for whom: "ranks 0, 2 wait for rank 1"."""
    return graph({stand.rank: tuple(sorted({rank for wait in stand.waits for rank in wait.ranks}))
                  for stand in stands if stand.waits}) or "no rank is known to wait for another"


def doings_told(stands: Sequence[Stand]) -> str:
    """What the ranks do, those that do the same together: "ranks 0, 2: each waits in recv; rank 1: sleeps"."""
    found = alike((stand.rank, stand.does) for stand in stands)
    told = [f"{named(who)}: {each_does(does, who)}" for does, who in found.items()]
    return "; ".join(told[:MOST_TOLD] + ["and others"] * (len(told) > MOST_TOLD))


def each_does(does: str, who: Sequence[int]) -> str:
    """What one rank does, or what each of several does."""
    return does if len(who) == 1 else f"each {does}"
