"""L2: decide how a launch ended, and describe it in a message that is the same in every run."""
from __future__ import annotations

import re
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import NamedTuple

from book.launch import family, graph, where
from book.launch.agreement import CallMismatch
from book.launch.board import Call, Group
from book.launch.causes import causes
from book.launch.child import Failure
from book.launch.ranks import RankProcess, Ranks
from book.launch.rpc import remote_error
from book.launch.stacks import of_crash
from book.launch.standing import Standing, named, plural

MISMATCH = CallMismatch.__name__
NEW_GROUP = "every rank must call it for every group, in the same order, members or not"
START_LIMIT_S = SEND_LIMIT_S = 300.0
SETTLE_LIMIT_S = 2.0
SETTLE_S = 0.3
LEAVE_LIMIT_S = 5.0
STOPPED = "is stopped by a signal (SIGSTOP)"
KEEPS_LOCK = "waits in C code that holds the interpreter lock"
RETURNED = "has returned, and its result is on its way"
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


class Found(NamedTuple):
    """Of a run that hangs: each rank's last call in each group, and the stacks of the ranks that cannot answer."""
    calls: Mapping[Group, Mapping[int, Call]]
    stacks: Mapping[int, str]


def ask_for_reports(ranks: Ranks) -> Found:
    """Ask every live rank where it is, and find the stacks of those that cannot answer: their C code holds the GIL."""
    deaf = ranks.deaf()
    ranks.ask("report")
    asked_s = time.monotonic()
    until_s = {member.rank: asked_s + (DEAF_LIMIT_S if member in deaf else REPORT_LIMIT_S)
               for member in ranks if member.stopped_s is None}
    # Ranks whose function has returned are asked too: what they have left undone may be the cause.
    while any(member.exit_code is None and member.report is None and time.monotonic() < until_s.get(member.rank, 0.0)
              for member in ranks):
        ranks.listen(0.05)
    for member in ranks:
        member.doing = _doing(member)
    # Read the calls first: the signal that asks for stacks may interrupt a call into C, and the run would go on.
    calls = ranks.last_calls()
    return Found(calls, ranks.dump(0.3))


def describe_hang(ranks: Ranks, verdict: str, limit_s: float, found: Found) -> str:
    """What each rank is doing in a run that hangs or has run out of time."""
    waiting = "the ranks wait for one another" if len(list(ranks)) > 1 else "the rank waits"
    first = {
        "hang": f"{waiting}: nothing has moved for {limit_s:g} s",
        "late": f"not done after {limit_s:g} s",
        "not started": f"the ranks could not start within {limit_s:g} s",
    }[verdict]
    word = "possible cause" if verdict == "late" else "cause"  # a slow run may be caught anywhere
    lines = [first, *(f"{word}: {cause}" for cause in causes(list(map(_standing, ranks)), found.calls))]
    lines += _lines_of(ranks, found.stacks)
    if any(member.working and member.report and member.report.doing == "waits in new_group" for member in ranks):
        lines.append(f"new_group: {NEW_GROUP}")
    return "\n".join(lines)


def waits_for(ranks: Ranks, found: Found) -> dict[int, tuple[int, ...]]:
    """For each rank of a run that hangs, once it has been asked: the ranks that it waits for."""
    return graph.waits_for(list(map(_standing, ranks)), found.calls)


def _standing(member: RankProcess) -> Standing:
    """What a rank is doing, as `causes` and `graph` need it."""
    report, doing = member.report, member.doing
    if report is None:
        return Standing(doing)
    if not member.working:
        return Standing(doing, dropped=report.dropped, left_out=report.left_out)
    return Standing(doing, str(report.place), report.blocked, report.worker, report.polled, report.dropped,
                    report.left_out)


def _lines_of(ranks: Ranks, stacks: Mapping[int, str]) -> Iterator[str]:
    """Where each rank is; ranks that stand at the same place share their lines."""
    alike: dict[tuple[str, ...], list[int]] = {}
    for member in ranks:
        beside = member.report.beside if member.working and member.report else ()
        alike.setdefault((_doing_at(member, stacks), *beside), []).append(member.rank)
    for (does, *beside), who in alike.items():
        yield f"  {named(who)} {plural(does, len(who))}"
        yield from (f"    {words}" for words in beside)


def _doing(member: RankProcess) -> str:
    """What a rank is doing, in words, without the place; if it waits for one of its threads, what that waits for."""
    if member.finished:
        return "finished"
    if member.returned:
        return RETURNED
    if member.stopped_s is not None:
        return STOPPED
    if not member.report:
        return KEEPS_LOCK if member.entered and family.is_asleep(member.process.pid) else "does not answer"
    return member.report.in_thread or member.report.doing


def _doing_at(member: RankProcess, stacks: Mapping[int, str]) -> str:
    """What a rank is doing, and where."""
    if member.doing in ("finished", RETURNED, STOPPED):
        return member.doing
    if not member.report:
        places = where.places(of_crash(stacks.get(member.rank, "")))
        does = "computes" if places and member.doing != KEEPS_LOCK else member.doing
        return f"{does} at {places[-1]}" if places else does
    return member.report.doing + (f" at {member.report.place}" if member.report.place else "")


def first_failure(ranks: Ranks) -> RankProcess:
    """The rank with the earliest root cause; among ranks that failed in the same way, the lowest."""
    failed = [member for member in ranks if member.failed]
    causes = [member for member in failed if not _is_victim(member)] or failed
    # A rank that died reports no time. Treat its death as a cause.
    first = min(causes, key=lambda member: (member.failure.time_s if member.failure else 0.0, member.rank))
    return min((member for member in causes if _kind(member) == _kind(first)), key=lambda member: member.rank)


def _is_victim(member: RankProcess) -> bool:
    return member.failure is not None and bool(VICTIM.search(member.failure.message))


def _kind(member: RankProcess) -> tuple[object, ...]:
    failure = member.failure
    return (failure.name, failure.places) if failure else (member.exit_code,)


def describe_failure(ranks: Ranks, first: RankProcess) -> str:
    """The root cause with the learner's own line, and the ranks that failed in the same way."""
    if first.failure and first.failure.name == MISMATCH:
        return first.failure.message  # which names all ranks and their lines
    lines = _raised(first, first.failure) if first.failure else _died(first)
    alike = [member.rank for member in ranks if member.failed and member is not first and _kind(member) == _kind(first)]
    if alike:
        lines.append(f"the same on {named(alike)}")
    return "\n".join(lines)


def _raised(member: RankProcess, failure: Failure) -> list[str]:
    places = failure.places if member.entered else ()
    place = f" in {places[-1]}" if places else "" if member.entered else " before its function started"
    head = f"rank {member.rank} failed{place}"
    error = f"{failure.name}: {steady(failure.message)}" if failure.message else failure.name
    return [head, *(_remote(failure.message) or [error]), *_callers(places[:-1])]


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
