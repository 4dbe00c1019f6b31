"""L2: decide how a launch ended: gather what is known of a run that hangs, and describe one that failed."""
from __future__ import annotations

import re
import signal
import time
from collections.abc import Mapping, Sequence
from itertools import groupby

from book.launch import family, where
from book.launch.agreement import CallMismatch
from book.launch.child import Asked, Failure
from book.launch.explain import NO_FILES, too_many_files
from book.launch.ranks import RankProcess, Ranks
from book.launch.rpc import remote_error
from book.launch.stacks import of_crash
from book.waiting.doing import Doing, Kind
from book.waiting.hang import CollectiveCall, Group, Hang, Standing
from book.words import named

MISMATCH = CallMismatch.__name__
START_LIMIT_S = SEND_LIMIT_S = 300.0
SETTLE_LIMIT_S = 2.0
SETTLE_S = 0.3
LEAVE_LIMIT_S = 5.0
REPORT_LIMIT_S, DEAF_LIMIT_S = 2.0, 0.5  # for a rank that has answered recently, and for one that has not
# Errors of a rank whose peer has died: an effect of the failure that we look for, not its cause.
VICTIM = re.compile(r"connection.{0,12}(closed|reset|refused)|broken pipe|socket closed|originated at tensorpipe",
                    re.IGNORECASE)
# What gloo prints before it aborts: bytes of the message, bytes of the tensor.
MISFIT = re.compile(r"(\d+) vs (\d+)\. Received data size doesn't match expected size")
_VARYING = (
    (re.compile(r"\[?(\d+\.\d+\.\d+\.\d+|\[[0-9a-f:]*::[0-9a-f:.]*|localhost)\]?:\d+"), "<address>"),
    (re.compile(r"0x[0-9a-fA-F]{6,}"), "<address>"),
    (re.compile(r"\nException raised from .*", re.DOTALL), ""),
)


def supervise(ranks: Ranks, timeout_s: float, hang_s: float) -> str:
    """Listen to the ranks until the launch is "done", "failed", "hang", "late" or "not started"; returns which."""
    tick_s = max(0.02, min(0.5, hang_s / 6))
    deadline_s, entered, returned = time.monotonic() + START_LIMIT_S, False, False
    next_look_s = 0.0
    while True:
        ranks.listen(tick_s)
        now_s = time.monotonic()
        if any(member.failed for member in ranks):
            _settle(ranks)
            return "failed"
        if not any(member.working for member in ranks):
            return "done"
        if not entered and all(member.entered for member in ranks):
            entered, deadline_s = True, now_s + timeout_s
        if not returned and all(member.returned for member in ranks if member.working):
            returned, deadline_s = True, now_s + SEND_LIMIT_S  # `timeout_s` is for what the functions do
        if entered and ranks.stand_still(hang_s):
            return "hang"
        if now_s >= deadline_s:
            return "late" if entered else "not started"
        if entered and now_s >= next_look_s:
            ranks.look()
            next_look_s = now_s + tick_s


def _settle(ranks: Ranks) -> None:
    """After the first failure, give the other ranks time to fail too or to stop moving.

    The failure that is shown must not depend on which message arrived first.
    """
    end_s = time.monotonic() + SETTLE_LIMIT_S
    while time.monotonic() < end_s and not ranks.stand_still(SETTLE_S):
        ranks.look()
        time.sleep(0.05)
        ranks.listen(0.0)


def ask_for_reports(ranks: Ranks) -> Hang:
    """Ask every live rank where it is, and find the stacks of those that cannot answer: their C code holds the GIL."""
    deaf = ranks.deaf()
    ranks.ask(Asked.REPORT)
    asked_s = time.monotonic()
    until_s = {member.rank: asked_s + (DEAF_LIMIT_S if member in deaf else REPORT_LIMIT_S)
               for member in ranks if member.stopped_s is None}
    # Ranks whose function has returned are asked too: what they have left undone may be the cause.
    while any(member.exit_code is None and member.report is None and time.monotonic() < until_s.get(member.rank, 0.0)
              for member in ranks):
        ranks.listen(0.05)
    standings = list(map(_standing, ranks))
    # Read the calls first: the signal that asks for stacks may interrupt a call into C, and the run would go on.
    calls = ranks.last_calls()
    for rank, stack in ranks.dump(0.3).items():
        places = where.places(of_crash(stack))
        if places and standings[rank].main.kind in (Kind.DEAF, Kind.IN_C):
            standings[rank] = standings[rank]._replace(place=str(places[-1]))
    return hang_of(standings, calls)


def hang_of(standings: Sequence[Standing], calls: Mapping[Group, Mapping[int, CollectiveCall]]) -> Hang:
    """The ranks and their last calls, which are done where the rank knows that they are."""
    return Hang(standings, {
        group: {rank: call._replace(done=_is_done(standings[rank], group, call)) for rank, call in last.items()}
        for group, last in calls.items()})


def _is_done(standing: Standing, group: Group, call: CollectiveCall) -> bool | None:
    """Whether a rank knows that its last call in a group is done."""
    known = standing.calls.get(group)
    return known.is_done if known is not None and known.total == call.number else None


def _standing(member: RankProcess) -> Standing:
    """What is known of a rank once it has been asked."""
    told, kind = member.report.standing if member.report else Standing(Doing(Kind.DEAF)), _kind(member)
    if kind is None:
        return told
    return told._replace(main=Doing(kind), place="", threads=None, worker=None, polled=told.polled and member.working)


def _kind(member: RankProcess) -> Kind | None:
    """What a rank is doing if its threads do not say, or if it does not matter what they do; else None."""
    if member.returned or member.finished:
        return Kind.FINISHED if member.finished else Kind.RETURNED
    if member.stopped_s is not None:
        return Kind.STOPPED
    if member.report:
        return None
    return Kind.IN_C if member.entered and family.is_asleep(member.process.pid) else Kind.DEAF


def first_failure(ranks: Ranks) -> RankProcess:
    """The rank with the earliest root cause; among ranks that failed in the same way, the lowest."""
    failed = [member for member in ranks if member.failed]
    causes = [member for member in failed if not _is_victim(member)] or failed
    # A rank that died reports no time. Treat its death as a cause.
    first = min(causes, key=lambda member: (member.failure.time_s if member.failure else 0.0, member.rank))
    return min((member for member in causes if _how(member) == _how(first)), key=lambda member: member.rank)


def _is_victim(member: RankProcess) -> bool:
    return member.failure is not None and is_victim(member.failure)


def is_victim(failure: Failure) -> bool:
    """Whether an error is one of those that the death of a peer causes."""
    return failure.explained is None and bool(VICTIM.search(failure.message))


def _how(member: RankProcess) -> tuple[object, ...]:
    failure = member.failure
    return (failure.name, failure.places) if failure else (member.exit_code,)


def describe_failure(ranks: Ranks, first: RankProcess) -> str:
    """The root cause with the learner's own line, and the ranks that failed in the same way."""
    if first.failure and is_mismatch(first):
        return first.failure.message  # which names all ranks and their lines
    lines = raised(first.rank, first.failure, first.entered) if first.failure else _died(first)
    alike = [member.rank for member in ranks if member.failed and member is not first and _how(member) == _how(first)]
    if alike:
        lines.append(f"the same on {named(alike)}")
    return "\n".join(lines)


def is_mismatch(member: RankProcess) -> bool:
    """Whether a rank has failed because its call does not match those of the others."""
    return member.failure is not None and member.failure.name == MISMATCH


def raised(rank: int, failure: Failure, entered: bool = True) -> list[str]:
    """A rank's error with the learner's lines; one that has not `entered` its function has none."""
    places = failure.places if entered else ()
    place = f" in {places[-1]}" if places else "" if entered else " before its function started"
    head = f"rank {rank} failed{place}"
    error = f"{failure.name}: {steady(failure.message)}" if failure.message else failure.name
    said = [] if failure.waited else [failure.explained] if failure.explained else [error]
    return [head, *(_remote(failure.message) or said), *_callers(places[:-1])]


def _callers(places: Sequence[where.Place]) -> list[str]:
    """A line for each place, innermost first; repeated places, as in a recursion, once."""
    lines = []
    for place, repeated in groupby(map(str, reversed(places))):
        count = len(list(repeated))
        lines.append(f"called from {place}" + (f", {count} times" if count > 1 else ""))
    return lines


def _remote(message: str) -> list[str]:
    """The lines for an error that an RPC call returned; none for any other error."""
    remote = remote_error(message)
    if remote is None:
        return []
    return [steady(remote.error), f"raised by {remote.worker}" + (f" in {remote.places[-1]}" if remote.places else "")]


def _died(member: RankProcess) -> list[str]:
    code = member.exit_code or 0
    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    places = where.places(of_crash("\n".join(member.errors.kept))) if code < 0 else []
    hint = ": the machine may have run out of memory" if code == -signal.SIGKILL else ""
    place = f" at {places[-1]}" if places else ""
    misfit = MISFIT.search("\n".join(member.errors.kept)) if code == -signal.SIGABRT else None
    lines = [f"rank {member.rank} {how} before its function returned{place}{hint}"]
    if code == -signal.SIGABRT and NO_FILES in "\n".join(member.errors.kept):
        lines.append(too_many_files(None))
    if misfit:
        sent, room = misfit.groups()
        lines.append(f"a message of {sent} bytes came for a tensor of {room} bytes: do the sizes differ between "
                     "ranks, or the order of the calls?")
        if int(sent) == 2 * int(room):
            lines.append("it is exactly twice as long: if both have the same number of elements, their dtypes differ, "
                         "as float64 and float32 do")
    return lines


def steady(text: str) -> str:
    """An error's text without the parts that change from run to run: addresses, ports, C++ stacks."""
    for pattern, replacement in _VARYING:
        text = pattern.sub(replacement, text)
    return text.strip()
