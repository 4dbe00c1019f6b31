"""L2: the judge of a job on one host: it reads what the ranks say, and prints what is wrong.

    python -m book.job.judge FOLDER PID_OF_TORCHRUN

It ends when torchrun's agent has. It imports no torch, and the ranks need not answer.
"""
from __future__ import annotations

import os
import shutil
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from book.job import ending, rates, told
from book.job.across import ANSWER_S, EXCHANGE_S, Calls, Exchange, ranks_of, seen
from book.job.deaths import Deaths
from book.job.members import Member
from book.launch import family
from book.launch.agreement import last_calls
from book.launch.board import Board
from book.launch.supervise import hang_of
from book.look import runs
from book.look.timelines import Timeline, timeline_of
from book.waiting.doing import Doing, Kind
from book.waiting.hang import CollectiveCall, Group, Hang, Standing
from book.waiting.message import causes_told, message
from book.waiting.standstill import Standstill, standstill

LOOK_S = 0.2
SETTLE_S = 1.0  # for the other ranks to fail too, after the first
DIFFERS_S = told.OTHERS_S + 1.0  # a rank that has found that calls differ has then heard the others
FOR_OTHERS = (Kind.CALL, Kind.POLLS, Kind.REQUEST, Kind.KEYS)  # waits for other ranks
QUIET = 6.0  # times the limit of a hang: so long may ranks compute and call nothing


class Judge:
    """What is known of a job's last start, and what has been said of it."""

    def __init__(self, folder: str, agent: int, hang_s: float, ends_hung: bool) -> None:
        self._folder, self._agent, self._hang_s, self._ends_hung = folder, agent, hang_s, ends_hung
        self._attempt: Path | None = None
        self._members: dict[int, Member] = {}  # of this host
        self._deaths = Deaths()
        self._elsewhere: dict[int, Member] = {}
        self._exchange: Exchange | None = None
        self._failed_in = 0  # the first report of this host in which a rank has failed
        self._said: list[str] = []
        self._told_hang = self._cause = ""  # the verdict on the hang that has been told, and its first cause
        self._standstill: Standstill | None = None  # that hang
        self._told_failure = self._told_mismatch = self._told_end = self._interrupted = False
        self._calls_elsewhere: list[Calls] = []
        self._work = rates.from_environment(os.environ)

    def interrupt(self, *_: object) -> None:
        """Blame nobody from now on: the ranks are ended from outside."""
        self._interrupted = True

    def watch(self) -> None:
        """Judge until torchrun is gone, then sum up."""
        while not family.is_gone(self._agent):
            self._look()
            if not self._interrupted and self._speaks():
                self._say_what_is_wrong()
            time.sleep(LOOK_S)
        self._look()
        if self._interrupted:
            self._say("\n".join(ending.times_told([*self._rings().values()], self._work)))
            self._keep(runs.HUNG if self._told_hang else runs.INTERRUPTED)
            return
        if not self._speaks(ANSWER_S):
            self._told_failure = self._told_failure or any(member.failed for member in self._members.values())
        else:
            self._say_what_differs(settled=True)
            self._say_what_has_failed(settled=True)
        if self._members and not self._told_failure:
            ranks = [self._members[rank].told for rank in sorted(self._members)]
            self._say(ending.summary(ranks, [*self._rings().values()], self._work))
            self._keep(runs.ENDED)

    def _say(self, text: str) -> None:
        self._said += text.splitlines()
        say(text)

    def _rings(self) -> dict[str, Timeline]:
        """What the ranks have noted of their time, by the files that hold it."""
        found = {}
        for rank, member in sorted(self._members.items()):
            assert self._attempt is not None  # ranks have said something
            file = told.ring_file(self._attempt, rank)
            if member.told.noted and file.exists():
                found[str(file.relative_to(self._folder))] = timeline_of(rank, file.read_bytes(), *member.told.noted)
        return found

    def _keep(self, state: str) -> None:
        """Leave in the folder what is known of the run, for its page."""
        totals = ending.totals([member.told for member in self._members.values()])
        with suppress(OSError):
            runs.write_run(Path(self._folder), state, self._said, self._rings(), totals, self._cause, self._standstill)

    def _look(self) -> None:
        latest = told.latest(self._folder)
        if latest is None:
            return
        if latest != self._attempt:
            self._attempt, self._members, self._elsewhere, self._failed_in = latest, {}, {}, 0
            self._told_hang, self._told_failure, self._told_mismatch, self._told_end = "", False, False, False
            if self._exchange:
                self._exchange.end()
                self._exchange = None
        now_s = time.monotonic()
        for rank, said in told.read(latest).items():
            if rank not in self._members:
                self._members[rank] = Member(said, now_s)
                self._deaths.follow(said.pid)
            self._members[rank].look(said, now_s, self._deaths.ended_s(said.pid))
        self._meet_others(now_s)

    def _meet_others(self, now_s: float) -> None:
        """Tell the judges of other hosts how this one's ranks are, and hear of theirs."""
        assert self._attempt is not None
        first = next(iter(self._members.values())).told if self._members else None
        if first is None or first.num_hosts == 1:
            return
        if self._exchange is None:
            self._exchange = Exchange(first, self._attempt.name)
        ranks = tuple(seen(member, self._attempt, now_s) for member in self._members.values())
        number = self._exchange.tell(ranks, self._own_calls(), self._told_end)
        if not self._failed_in and any(member.failed for member in self._members.values()):
            self._failed_in = number
        heard = self._exchange.heard()
        self._elsewhere = {rank: one for report, came_s in heard for rank, one in ranks_of(report, came_s).items()}
        self._calls_elsewhere = [report.calls for report, _ in heard]
        if self._exchange.host and any(report.ends for report, _ in heard):
            self._end_ranks()

    def _speaks(self, limit_s: float = 0.0) -> bool:
        """Whether this judge says what is wrong: that of host 0 does where it has read of this host's failures.

        Nor does this one where a rank of it has only lost another host's: the error is there.
        """
        if self._exchange is None or self._exchange.host == 0:
            return True
        failed = [member for member in self._members.values() if member.failed]
        if failed and min(failed, key=Member.failed_s).is_victim:
            return False
        return not self._exchange.heard() or not self._exchange.is_read(self._failed_in, limit_s)

    def _say_what_is_wrong(self) -> None:
        self._say_what_differs(settled=False)
        self._say_what_has_failed(settled=False)
        if self._told_failure:
            return
        verdict = self._verdict()
        if not verdict and self._told_hang and not any(member.failed for member in self._all().values()):
            self._say("the ranks go on")
        if verdict and not self._told_hang:
            limit_s = self._hang_s * (QUIET if verdict == "quiet" else 1)
            hang = self._hang()
            self._say(message(hang, verdict, limit_s))
            self._cause = next(iter(causes_told(hang, verdict)), "")
            self._standstill = standstill(hang, {rank for rank, member in self._all().items() if member.died})
            self._keep(runs.HUNG)
            if self._ends_hung:
                self._end()
        self._told_hang = verdict

    def _verdict(self) -> str:
        """How the ranks stand: "hang", "quiet" if nothing has been called for long, "" if they move."""
        members, now_s = list(self._all().values()), time.monotonic()
        working = [member for member in members if member.works]
        hears_all = self._exchange is not None and self._exchange.hears_all()
        if not working or len(members) < (working[0].told.world_size if hears_all else len(working[0].told.host_ranks)):
            return ""
        calm_s = now_s - max(member.moved_s for member in members)
        still = [member.still_s(now_s) for member in working]
        if min(calm_s, *still) >= self._hang_s:
            return "hang"
        # One that waits may seem to move beside one that takes all cores: what it says it does decides.
        waits = any(member.told.standing and member.told.standing.main.kind in FOR_OTHERS for member in working)
        return "quiet" if waits and calm_s >= QUIET * self._hang_s else ""

    def _all(self) -> dict[int, Member]:
        """All ranks that are known, those of other hosts too."""
        return dict(sorted({**self._elsewhere, **self._members}.items()))

    def _hang(self) -> Hang:
        known = self._all()
        now_s, size = time.monotonic(), max(member.told.world_size for member in known.values())
        assert self._attempt is not None  # ranks have said something
        standings = [known[rank].standing(self._attempt, now_s) if rank in known
                     else Standing(Doing(Kind.UNKNOWN), "another host") for rank in range(size)]
        return hang_of(standings, self._calls())

    def _calls(self) -> dict[Group, dict[int, CollectiveCall]]:
        """The last calls of the ranks of all hosts that are heard."""
        found: dict[Group, dict[int, CollectiveCall]] = {}
        for calls in (self._own_calls(), *self._calls_elsewhere):
            for group, last in calls.items():
                found.setdefault(group, {}).update(last)
        return found

    def _own_calls(self) -> dict[Group, dict[int, CollectiveCall]]:
        """The last calls of this host's ranks, which their board keeps though they are dead."""
        first = next(iter(self._members.values()), None)
        if first is None or self._attempt is None or not (self._attempt / told.BOARD).exists():
            return {}
        board = Board.at(self._attempt / told.BOARD, first.told.host_ranks)
        try:
            return last_calls(board)
        finally:
            board.close()

    def _end(self) -> None:
        """Kill the ranks; torchrun says how they ended, or starts them again."""
        self._say("ended, as --end-hung asks")
        self._told_end = True
        if self._exchange:  # torchrun's store goes with the ranks of host 0
            self._look()
            time.sleep(2 * EXCHANGE_S)
        self._end_ranks()

    def _end_ranks(self) -> None:
        # A worker of a loader that is stuck too would not notice that its rank is gone.
        family.end([member.told.pid for member in self._members.values() if member.works])
        self._told_failure = True  # their deaths are no news

    def _say_what_differs(self, settled: bool) -> None:
        found = [member.told.mismatch for member in self._all().values() if member.told.mismatch]
        if not found or self._told_mismatch:
            return
        first = min(found, key=lambda one: one.time_s)
        stood = told.stood({rank: member.told for rank, member in self._all().items()}, first)
        is_known = stood.keys() >= self._all().keys()
        if settled or is_known or time.monotonic() > first.time_s + DIFFERS_S:
            self._told_mismatch = True
            ranks = [stood.get(rank, standing) for rank, standing in enumerate(self._hang().ranks)]
            self._say(ending.difference(max((one.words for one in found), key=len),
                                        hang_of(ranks, first.calls) if is_known else None))

    def _say_what_has_failed(self, settled: bool) -> None:
        failed = [member for member in self._all().values() if member.failed]
        if not failed or self._told_failure:
            return
        if settled or time.monotonic() - min(member.failed_s() for member in failed) > SETTLE_S:
            self._told_failure = True
            self._say_what_differs(settled=True)
            self._say(ending.failure(list(self._all().values()), self._hang(), self._told_mismatch))
            if self._exchange and all(member.is_victim for member in failed):
                self._say("what happened to that peer is said on its host")
            self._keep(runs.FAILED)


def say(text: str) -> None:
    """Print each line, marked as the judge's."""
    print("".join(f"[lockstep] {line}\n" for line in text.splitlines()), end="", file=sys.stderr, flush=True)


def main(arguments: Sequence[str]) -> None:
    """Judge the job in a folder, whose agent has this process id; delete the folder unless its name was asked for."""
    folder, agent = arguments
    hang_s = float(os.environ.get(told.HANG_S, told.DEFAULT_HANG_S))
    try:
        judge = Judge(folder, int(agent), hang_s, told.END_HUNG in os.environ)
        signal.signal(signal.SIGTERM, judge.interrupt)
        judge.watch()
    finally:
        if told.FOLDER not in os.environ:
            shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main(sys.argv[1:])
